package shell

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestPlain(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		for _, c := range []struct {
			command, out string
			status       int
		}{
			{"echo hi", "hi\n", 0},
			{"", "", 0},
			{"# only a comment", "", 0},
			{"echo a # comment", "a\n", 0},
			{"echo a\\", "a\\\n", 0}, // eval's text ends there, so nothing is escaped
			{"(exit 3)", "", 3},
			{"echo $?", "3\n", 0},
			{"false", "", 1},
			{"", "", 0}, // eval of nothing succeeds
			{"echo \"it's $((1+1))\" '$x'", "it's 2 $x\n", 0},
			{"cat <<X\n$((2+3)) '\nX\n", "5 '\n", 0},
			{"cat <<X\nfoo\nX\n(exit 9)", "foo\n", 9},
			{"x=5; y='a b'", "", 0},
			{"echo $x $y\n\necho done", "5 a b\ndone\n", 0},
			{"for i in 1 2 3; do\n echo $i\ndone", "1\n2\n3\n", 0},
			{"f() { return 4; }; f", "", 4},
			{"printf 'no newline'", "no newline", 0},
			{"set -- a 'b c'", "", 0},
			{"echo $# \"$2\"", "2 b c\n", 0},
			{"set --", "", 0},
			{"cd /; pwd; echo $PWD", "/\n/\n", 0},
			{"case $- in *i*) echo yes;; esac", "yes\n", 0},
			{"[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty", "tty\n", 0},
			{"printf '\\0sf1\\0abc\\0000\\0'; printf '\\033[2J'", "\x00sf1\x00abc\x000\x00\x1b[2J", 0},
			{"! true", "", 1},
			{"IFS=0123; set -f; set -C", "", 0},
			{"(exit 213)", "", 213},
			{"set +f; set +C; unset IFS", "", 0},
		} {
			r.expect(c.command, c.out, c.status)
		}
		r.contains("sh -c 'kill -9 $$'", "", 137)
		if r.last.Dir != "/" {
			t.Errorf("the directory is %q", r.last.Dir)
		}
	})
}

func TestSyntaxErrors(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.run("x=kept")
		for _, c := range []string{"echo \"open", "echo 'open", "$(", "echo $(", "for", "if true", "echo )", "}", "{ echo", "case x in", "echo `", "echo ${x"} {
			if out, status := r.run(c); status == 0 || out == "" || strings.Contains(out, "sf1") {
				t.Errorf("%q: printed %q with status %d", c, out, status)
			}
			r.expect("echo $x", "kept\n", 0)
		}
		r.contains("cat <<X\nfoo", "foo", 0)
		r.expect("echo $x", "kept\n", 0)
	})
}

func TestOptions(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		flag := func(c string) { t.Helper(); r.expect("case $- in *"+c+"*) echo on;; esac", "on\n", 0) }
		r.run("set -u")
		flag("u")
		r.contains("echo $nope; echo after", "nope: ", map[Dialect]int{Bash: 1, Dash: 2, Ash: 2}[s.d])
		r.run("set +u")
		p := "+ "
		if s.d == Bash {
			p = "++ " // one more for eval
		}
		r.expect("set -x; :", p+":\n", 0)
		r.expect("echo a", p+"echo a\na\n", 0)
		r.expect("(exit 3)", p+"exit 3\n", 3)
		r.expect("echo $?", p+"echo 3\n3\n", 0)
		r.contains("echo 'open", "", 2)
		r.expect("set +x", p+"set +x\n", 0)
		r.expect("echo a", "a\n", 0)
		r.run("set -v")
		r.contains("echo a", "a\n", 0)
		r.contains("case $- in *v*) echo on;; esac", "on\n", 0)
		r.run("set +v")
		r.expect("set -a; V=1", "", 0)
		r.expect("W=2; sh -c 'echo $V $W'; echo $PS1", "1 2\n\n", 0)
		r.run("set +a")
		r.expect("set -e; true", "", 0)
		flag("e")
		if s.d == Bash {
			r.expect("[ a = b ] && echo no", "", 1)
			flag("e")
		}
		if ps := r.dies("echo last; false; echo no"); ps.ExitCode() != 1 {
			t.Errorf("status %d", ps.ExitCode())
		}
		if out := r.output(); out != "last\n" {
			t.Errorf("printed %q", out)
		}
	})
}

func TestPrompts(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.expect("PS1='p1> ' PS2=\"it's \"; PS4='% '", "", 0)
		r.expect("echo \"$PS1$PS2\"\necho x", "p1> it's \nx\n", 0)
		r.contains("set -x; :", "% :\n", 0)
		r.expect("{ set +x; } 2>/dev/null; echo \"$PS1\"", "p1> \n", 0)
		if s.d == Bash {
			r.expect("PROMPT_COMMAND='echo prompt'", "", 0)
			r.expect("echo $PROMPT_COMMAND", "echo prompt\n", 0)
		}
	})
}

func TestTraps(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.expect("trap", "", 0)
		r.run("trap 'echo got it' INT; trap 'echo \"by'\\''e\"' EXIT")
		r.expect("kill -INT $$; :", "got it\n", 0)
		out, _ := r.run("trap")
		r.expect("trap", out, 0)
		r.run("trap - INT")
		if s.d == Bash {
			r.run("trap 'echo err' ERR")
			r.expect("false; true", "err\n", 0)
			r.run("trap - ERR; trap 'echo d' DEBUG")
			r.expect("echo a", "d\na\n", 0)
			r.expect("trap - DEBUG", "d\n", 0)
		}
		r.expect("echo a", "a\n", 0)
		if ps := r.dies("exit 7"); ps.ExitCode() != 7 {
			t.Errorf("status %d", ps.ExitCode())
		}
		if out := r.output(); !strings.HasSuffix(out, "by'e\n") {
			t.Errorf("printed %q", out)
		}
	})
}

func TestNames(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		names := "cd echo printf test [ read umask true"
		if s.d == Bash {
			names += " eval exit set unset export trap declare exec command"
		}
		for _, n := range strings.Fields(names) {
			if n != "[" || s.d == Bash {
				r.run(n + "() { :; }")
			}
		}
		r.expect("sh -c 'exit 3'", "", 3)
		r.expect("sh -c \"exit $?\"", "", 3)
		r.run("alias eval=false builtin=false command=false printf=false set=false trap=false umask=false")
		r.expect("sh -c 'exit 4'", "", 4)
		if s.d != Bash {
			r.run("\\unalias -a; command() { :; }")
			r.expect("(exit 5)", "", 5)
		}
	})
}

func TestInterrupt(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.run("x=kept")
		// Not the builtin echo: ash jumps out of its signal handler, and if
		// that was while it held the lock of its output it stands still.
		for range 3 {
			for _, c := range []struct{ command, program string }{
				{"/bin/echo up; while :; do :; done; echo no", "shell"},
				{"/bin/echo up; sleep 100; echo no", "sleep"},
				{"/bin/echo up; read x; echo no", "shell"},
				{"/bin/echo up; cat; echo no", "cat"},
				{"f() { /bin/echo up; while :; do :; done; }; f; echo no", "shell"},
			} {
				token := r.post(c.command)
				if _, err := r.screen.until([]byte("up\n")); err != nil {
					t.Fatal(err)
				}
				// A ^C for echo, which has done its work, is lost.
				r.eventually(c.program+" runs", func() bool { return r.foreground() == c.program })
				if _, err := r.master.Write([]byte{3}); err != nil {
					t.Fatal(err)
				}
				out := r.interrupted(token)
				if r.last.Status != 130 || strings.Contains(out, "no") || strings.Contains(out, "sf1") {
					t.Errorf("%q: printed %q with status %d", c.command, out, r.last.Status)
				}
				r.expect("echo $? $x", "130 kept\n", 0)
			}
		}
		// Nobody runs: the shell is not disturbed.
		for range 3 {
			if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
		r.contains("echo alive", "alive\n", 0)
		r.contains("kill -INT $$; echo after", "", 130)
		r.expect("echo alive", "alive\n", 0)
	})
}

func TestJobs(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.run("set -m")
		// Until it has set its signals up, the child ignores what the shell does:
		// dash's "kill" just after "&" is lost.
		r.run("sleep 1000 & p=$!; until [ \"$(cat /proc/$p/comm)\" = sleep ]; do :; done")
		r.contains("jobs", "sleep 1000", 0)
		r.expect("[ $(cut -d ' ' -f 5 /proc/$p/stat) = $p ] && echo own", "own\n", 0)
		r.run("kill %1; wait %1 2>/dev/null")
		r.run("sh -c 'kill -STOP $$; exit 6'")
		r.contains("jobs", "topped", 0)
		r.contains("fg", "sh -c", 6)
		r.run("sleep 0.01 &")
		r.run("sleep 0.2")
		r.expect("echo quiet", "quiet\n", 0)
	})
}

func TestDescriptors(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		list := "/bin/ls /proc/self/fd | tr '\\n' ' '"
		r.contains(list, "0 1 2 3 \n"[:8], 0) // 3 is the directory ls reads
		r.expect("(/bin/ls /proc/self/fd; : ) | grep -c .", "4\n", 0)
		file := filepath.Join(t.TempDir(), "out")
		r.expect("exec >"+file, "", 0)
		r.expect("echo to file", "", 0)
		r.expect("exec >/dev/tty", "", 0)
		r.expect("cat "+file, "to file\n", 0)
		r.run("exec 7>/dev/null 8>/dev/null 9>/dev/null")
		r.expect("(exit 3)", "", 3)
		r.expect("exec 2>&1; echo ok", "ok\n", 0)
	})
}

func TestEnds(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		for _, c := range []struct {
			command string
			code    int
			signal  syscall.Signal
		}{
			{"exit 5", 5, 0}, {"exec sh -c 'exit 6'", 6, 0}, {"kill -9 $$", -1, 9},
			{"sh -c 'echo $$ >pid; exec sleep 1000' & until [ -s pid ]; do :; done; exit 8", 8, 0},
			{"setsid sh -c 'echo $$ >pid; exec sleep 1000' & until [ -s pid ]; do :; done; exit 9", 9, 0},
		} {
			r := start(t, s, nil)
			ps := r.dies(c.command)
			ws := ps.Sys().(syscall.WaitStatus)
			if ps.ExitCode() != c.code || c.signal != 0 && ws.Signal() != c.signal {
				t.Errorf("%q: %v", c.command, ps)
			}
			if b, err := os.ReadFile(filepath.Join(r.cmd.Dir, "pid")); err == nil {
				var pid int
				if _, err := fmt.Sscan(string(b), &pid); err != nil || pid < 2 {
					t.Fatalf("pid %q: %v", b, err)
				}
				// It does not hold the report pipe: dies has read its end.
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
					t.Error(err)
				}
			}
		}
		if s.d != Bash {
			for command, code := range map[string]int{"return 3": 3, "exec /nonexistent": 127} {
				if ps := start(t, s, nil).dies(command); ps.ExitCode() != code {
					t.Errorf("%q: %v", command, ps)
				}
			}
		}
		r := start(t, s, nil)
		if s.d == Bash {
			r.contains("return 3", "can only", 2)
			r.contains("exec /nonexistent", "No such file", 127)
			r.contains("set -o posix; for", "syntax error", 2)
			r.contains(". /nonexistent", "No such file", 1)
			r.contains("set +o posix; set -o history", "", 0)
			r.expect("set -n; echo n", "n\n", 0)
		}
		r.expect("readonly PS1", "", 0)
		r.expect("echo \"<$PS1>\"", "<>\n", 0)
		r.run("break; continue")
		r.expect("echo alive", "alive\n", 0)
	})
}

func TestReplacement(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.run("export A='it'\\''s\n $x \"q\" `b`' B=; C=local; umask 027; export PS1=prompt")
		n := start(t, s, r.last)
		r.run("PS1=")
		n.expect("printf '<%s>' \"$A\" \"$B\" \"$C\" \"$PS1\"; umask; sh -c 'echo \"$A\"'", "<it's\n $x \"q\" `b`><><><prompt>0027\nit's\n $x \"q\" `b`\n", 0)
	})
}

func TestProbe(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := launch(t, s.path, "sh", Unknown)
		token := newToken()
		r.send(Probe(token))
		_ = r.reports.SetDeadline(time.Now().Add(patience))
		r.reader.p.ExpectProbe(token)
		st, err := r.reader.any()
		if err != nil {
			t.Fatal(err)
		}
		d, err := st.Probed()
		if err != nil || d != s.d {
			t.Fatalf("it is %v, %v; %q", d, err, r.output())
		}
		exe := s.path
		if d == Ash {
			exe = filepath.Join(t.TempDir(), "sh")
			if err := os.Symlink(s.path, exe); err != nil {
				t.Fatal(err)
			}
		}
		text, err := d.Exec(exe)
		if err != nil {
			t.Fatal(err)
		}
		r.d = d
		r.packets()
		r.send(text)
		r.begin(nil)
		r.expect("echo hi; (exit 3)", "hi\n", 3)
	})
}

// TestUnchanged compares what a shell says of itself before and after.
func TestUnchanged(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		look := "set | grep -v -e '^_=' -e ^LINENO -e ^RANDOM -e ^SRANDOM -e ^EPOCH -e ^SECONDS -e ^BASH_LINENO -e ^PIPESTATUS -e ^BASH_ARG -e ^BASH_COMMAND; trap; alias; umask; export -p; jobs; echo $-"
		if s.d == Bash {
			look += "; declare -F; shopt; history"
		}
		r.run(look)
		before, _ := r.run(look)
		for i := range 50 {
			r.run(fmt.Sprintf("(exit %d)", i))
		}
		r.run(":")
		if after, _ := r.run(look); after != before || strings.Contains(after, "sf1") || len(after) < 100 {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	})
}

// TestRandom runs random steps and compares every byte and every status.
func TestRandom(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		rng := rand.New(rand.NewSource(1))
		file := filepath.Join(t.TempDir(), "bytes")
		for i := range 200 {
			data := make([]byte, rng.Intn(4000))
			_, _ = rng.Read(data)
			if i%3 == 0 {
				data = bytes.Repeat([]byte("\x00sf1\x00"+newToken()+"\x000\x00\x00end.\xe2\x82\x1b[1m\n"), rng.Intn(50))
			}
			if err := os.WriteFile(file, data, 0o600); err != nil {
				t.Fatal(err)
			}
			code := rng.Intn(256)
			r.expect(fmt.Sprintf("cat %s; (exit %d)", file, code), string(data), code)
		}
	})
}

func TestLong(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		word := strings.Repeat("it's ", 1<<20/5)
		r.expect("x="+Quote(word)+"; echo ${#x}", fmt.Sprintln(len(word)), 0)
		r.expect("[ \"$x\" = "+Quote(word)+" ]", "", 0)
		r.expect(strings.Repeat("echo $?\n", 500)+"(exit 3)", strings.Repeat("0\n", 500), 3)
	})
}

func FuzzQuote(f *testing.F) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		f.Skip("needs sh")
	}
	for _, s := range []string{"", "'", "a b", "\\", "\n", "it's '' \"$x\" `y` !"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.IndexByte(s, 0) >= 0 || len(s) > 10000 {
			t.Skip()
		}
		out, err := exec.Command(sh, "-c", "printf %s "+Quote(s)).Output()
		if err != nil || string(out) != s {
			t.Errorf("%q became %q, %v", s, out, err)
		}
	})
}

func FuzzParser(f *testing.F) {
	const token = "0123456789abcdef"
	good := "\x00sf1\x00" + token + "\x007\x00himB\x00/\x00\x00trap\x000022\n\x00export A=b\n\x00\x00\x00end." + token + "\x00"
	f.Add([]byte(good))
	f.Add([]byte(good[:20] + good))
	f.Add([]byte(strings.Replace(good, "\x007\x00", "\x00256\x00", 1)))
	f.Add([]byte("\x00sf1\x00" + token + "\x00sf1\x00" + token + "\x000\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var whole Parser
		whole.Expect(token)
		n, st, err := whole.Feed(b)
		if st != nil && err != nil || st == nil && err == nil && n != len(b) {
			t.Fatalf("both, or it stopped at %d of %d: %+v, %v", n, len(b), st, err)
		}
		if st != nil && (st.Status < 0 || st.Status > 255 || !bytes.Contains(b, []byte("sf1\x00"+token+"\x00"))) {
			t.Errorf("%q is %+v", b, st)
		}
		// Pieces change nothing, nor does another parser that goes on.
		var p Parser
		p.Expect(token)
		pst, pn, perr := feed(&p, b)
		if pn != n || !reflect.DeepEqual(pst, st) || fmt.Sprint(perr) != fmt.Sprint(err) {
			t.Errorf("%q in pieces is %+v, %d, %v; else %+v, %d, %v", b, pst, pn, perr, st, n, err)
		}
		// A report that was cut off, and one for another step, change nothing.
		if strings.Contains(string(b), "end."+token) {
			return
		}
		st, _, err = feed(&p, []byte("\x00sf1\x00"+token+"\x007\x00f\x00/\x00t\x000022\n\x00e\x00p\x00end."+token+"\x00"))
		if err != nil || st == nil || st.Status != 7 || st.Dir != "/" || st.Exports != "e" || st.Umask != "0022" {
			t.Errorf("after %q: %+v, %v", b, st, err)
		}
	})
}

// TestProbed knows shells by their builtins, and refuses others.
func TestProbed(t *testing.T) {
	const token = "0123456789abcdef"
	for found, want := range map[string]Dialect{"shopt\nlet\n": Bash, "let\n": Ash, "": Dash, "setopt\nwhence\nlet\n": Unknown, "whence\nlet\n": Unknown} {
		var p Parser
		p.ExpectProbe(token)
		st, _, err := feed(&p, []byte(found+"\x00"+token+"\x00"))
		if err != nil || st == nil {
			t.Fatalf("%q: %+v, %v", found, st, err)
		}
		d, err := st.Probed()
		if d != want || (err != nil) != (want == Unknown) {
			t.Errorf("%q is %v, %v", found, d, err)
		}
	}
	var p Parser
	p.ExpectProbe(token)
	if st, _, err := feed(&p, []byte("let\n\x00fedcba9876543210\x00")); st != nil || err != nil {
		t.Errorf("an answer to another question is %+v, %v", st, err)
	}
}

// TestStateJSON has a shell go on with a state that was kept as JSON.
func TestStateJSON(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		r.run("trap 'echo got it' INT; PS1='p> '; set -u; set -a; umask 077; export A='b\nc'; (exit 7)")
		before := *r.last
		b, err := json.Marshal(before)
		if err != nil {
			t.Fatal(err)
		}
		var after State
		if err := json.Unmarshal(b, &after); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(before, after) || after.Status != 7 || after.traps == "" || len(after.prompts) == 0 {
			t.Errorf("%+v became %+v by %s", before, after, b)
		}
		r.last = &after
		r.expect("echo $? \"$PS1\"; case $- in *a*) echo a;; esac; kill -INT $$", "7 p> \na\ngot it\n", 0)
		if err := json.Unmarshal([]byte(`{"status":"x"}`), &after); err == nil {
			t.Error("no error")
		}
	})
}

// TestAgain asks for a report that nothing has come before, and drops others.
func TestAgain(t *testing.T) {
	each(t, func(t *testing.T, s subject) {
		r := start(t, s, nil)
		dropped := r.post("(exit 3)")
		token := newToken()
		text, err := r.d.Again(token)
		if err != nil {
			t.Fatal(err)
		}
		r.send(text)
		if out := r.report(token); out != "" || r.last.Status != 0 {
			t.Errorf("printed %q, status %d", out, r.last.Status)
		}
		if dropped == token {
			t.Fatal("tokens repeat")
		}
		r.expect("echo a", "a\n", 0)
	})
}

// TestRefused has no text for what cannot be sent.
func TestRefused(t *testing.T) {
	for name, f := range map[string]func() error{
		"nul":     func() error { _, err := Bash.Step("a\x00b", newToken(), &State{}); return err },
		"token":   func() error { _, err := Dash.Step("a", "$(reboot)12345678", &State{}); return err },
		"dialect": func() error { _, err := Unknown.Start(newToken(), nil); return err },
		"exec":    func() error { _, err := Unknown.Exec("/bin/sh"); return err },
		"large": func() error {
			var p Parser
			_, _, err := feed(&p, bytes.Repeat([]byte("x"), MaxReport+1))
			return err
		},
	} {
		if err := f(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func BenchmarkTrue(b *testing.B) {
	for _, s := range subjects {
		b.Run(s.name, func(b *testing.B) {
			r := start(b, need(b, s), nil)
			_ = r.reports.SetDeadline(time.Time{})
			for b.Loop() {
				token := newToken()
				text, err := r.d.Step("true", token, r.last)
				if err != nil {
					b.Fatal(err)
				}
				for _, c := range text {
					if _, err := r.commands.Write(c); err != nil {
						b.Fatal(err)
					}
				}
				if r.last, err = r.reader.next(token); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
