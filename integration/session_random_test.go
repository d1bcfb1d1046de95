package integration_test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/statefork/statefork/shim/api"
)

// hostile are texts that look like what drivers of shells use among themselves,
// ours included.
var hostile = [][]byte{
	[]byte("\x00sf1\x000123456789abcdef0123456789abcdef\x000\x00himBHs\x00/\x00\x00"),
	[]byte("\x00end.0123456789abcdef0123456789abcdef\x00"),
	[]byte("sf1\nend.\n{ \\builtin printf '\\0%s' sf1\n"),
	[]byte("\x1b[2J\x1b[H\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[6n\x1bP"),
	[]byte("\r\n\r\r\b\b\x7f\x03\x04\x1a\x1c\x11\x13"),
	[]byte("\xe2\x82\xac split \xe2\x82"), []byte("\xac\xff\xfe\xc0\x80"),
	[]byte("$ # % > root@host:~# \n__CMD_END__ 0\nEOF\n'\"`$("),
	bytes.Repeat([]byte{0}, 100), []byte("no newline at the end"), {},
}

// randomStep is a command with what it must print and end with.
type randomStep struct {
	command string
	code    int
	out     []byte
}

func newRandomStep(r *rand.Rand, i int) randomStep {
	st := randomStep{code: r.IntN(256)}
	if r.IntN(3) == 0 {
		st.code = 0
	}
	var b strings.Builder
	for range r.IntN(4) {
		switch r.IntN(5) {
		case 0:
			text := fmt.Sprintf("plain %d %x", i, r.Uint64())
			st.out = append(append(st.out, text...), '\n')
			fmt.Fprintf(&b, "echo '%s'; ", text)
		case 1:
			p := make([]byte, r.IntN(3000))
			for k := range p {
				p[k] = byte(r.Uint32())
			}
			st.print(&b, p)
		case 2:
			n := 1 + r.IntN(40)
			for k := 1; k <= n; k++ {
				st.out = fmt.Appendln(st.out, k)
			}
			fmt.Fprintf(&b, "seq %d | cat\n", n)
		default:
			st.print(&b, hostile[r.IntN(len(hostile))])
		}
	}
	fmt.Fprintf(&b, "last=%d; (exit %d)", i, st.code)
	st.command = b.String() + []string{"", "\n", " # note", ";", " && true"}[r.IntN(5)]
	return st
}

// print has bytes printed that no command can hold.
func (st *randomStep) print(b *strings.Builder, p []byte) {
	st.out = append(st.out, p...)
	fmt.Fprintf(b, "base64 -d <<'EOF'\n%s\nEOF\n", base64.StdEncoding.EncodeToString(p))
}

// TestB133RandomSteps runs 2,000 random commands, on all shells at once. Each
// must have its own code and exactly its own output.
func TestB133RandomSteps(t *testing.T) {
	e := withDebian(t)
	random := seeded(t)
	seeds := make([]uint64, len(subjects))
	for i := range seeds {
		seeds[i] = random.Uint64()
	}
	t.Run("shells", func(t *testing.T) {
		for i, sub := range subjects {
			t.Run(sub.shell, func(t *testing.T) {
				t.Parallel()
				s := e.with(t).shelled(sub)
				for j, part := range []string{"main", "second"} {
					s.in(part).randomSteps(sub.shell, rand.New(rand.NewPCG(seeds[i], uint64(j))), 334)
				}
				s.long()
			})
		}
	})
}

func (s *sessions) randomSteps(shell string, r *rand.Rand, n int) {
	s.e.Helper()
	s.open(map[bool]string{true: "", false: shell}[s.name == "main"])
	for i := range n {
		st := newRandomStep(r, i)
		got := s.run(&api.StartStepRequest{Command: []byte(st.command)})
		if !got.ExitKnown || int(got.ExitCode) != st.code || got.out != string(st.out) || got.OutputBytes != uint64(len(st.out)) {
			s.e.Fatalf("step %d: %q ends with %d and prints %q, want %d and %q (%v)", i, st.command, got.ExitCode, got.out, st.code, st.out, got.StepResponse)
		}
	}
	s.want("echo $last", 0, fmt.Sprintf("%d\n", n-1))
}

// long prints 50,000 hostile lines while another session runs short steps.
func (s *sessions) long() {
	s.e.Helper()
	const line = "\x1b[31m\x00sf1\x00end.\xe2\x82"
	var other sync.WaitGroup
	other.Go(func() {
		for i := range 20 {
			r := s.in("second").sh(fmt.Sprintf("echo %d; (exit %d)", i, i))
			if r.out != fmt.Sprintf("%d\n", i) || int(r.ExitCode) != i {
				s.e.Errorf("beside a long step: %d, %q, want %d", r.ExitCode, r.out, i)
			}
		}
	})
	r := s.in("main").sh(`seq 50000 | sed "s/.*/$(printf '\033[31m\001sf1\001end.\342\202')/" | tr '\001' '\000'; (exit 77)`)
	other.Wait()
	if want := strings.Repeat(line+"\n", 50_000); r.out != want || r.ExitCode != 77 {
		s.e.Errorf("the long step ends with %d and %d bytes, want 77 and %d: %.200q", r.ExitCode, len(r.out), len(want), r.out)
	}
}
