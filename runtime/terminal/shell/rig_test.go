package shell

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a test waits for a shell.
const patience = 20 * time.Second

// A screen keeps what comes out of a PTY.
type screen struct {
	mu    sync.Mutex
	buf   []byte
	event chan struct{}
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.buf = append(s.buf, p...)
	s.mu.Unlock()
	select {
	case s.event <- struct{}{}:
	default:
	}
	return len(p), nil
}

// until takes what is before mark, and mark, once it is there.
func (s *screen) until(mark []byte) ([]byte, error) {
	deadline := time.After(patience)
	for {
		s.mu.Lock()
		if i := bytes.Index(s.buf, mark); i >= 0 {
			out := bytes.Clone(s.buf[:i])
			s.buf = s.buf[i+len(mark):]
			s.mu.Unlock()
			return out, nil
		}
		got := len(s.buf)
		s.mu.Unlock()
		select {
		case <-s.event:
		case <-deadline:
			return nil, fmt.Errorf("wait for %q on the terminal: have %d bytes", mark, got)
		}
	}
}

// A reader reads reports in pieces of random sizes, and goes on with another
// Parser now and then.
type reader struct {
	r      io.Reader
	p      Parser
	unread []byte
}

// next reads the report that has token.
func (r *reader) next(token string) (*State, error) {
	r.p.Expect(token)
	return r.any()
}

func (r *reader) any() (*State, error) {
	for {
		st, n, err := feed(&r.p, r.unread)
		r.unread = r.unread[n:]
		if st != nil || err != nil {
			return st, err
		}
		buf := make([]byte, 1+mathrand.IntN(8<<10))
		if n, err = r.r.Read(buf); err != nil {
			return nil, err
		}
		r.unread = buf[:n]
	}
}

// feed gives p all of b up to the end of a report, in pieces of random sizes,
// and says how much that was. In between p is replaced by one that goes on.
func feed(p *Parser, b []byte) (*State, int, error) {
	total := 0
	for total < len(b) {
		piece := b[total:]
		piece = piece[:1+mathrand.IntN(len(piece))]
		n, st, err := p.Feed(piece)
		if total += n; st != nil || err != nil {
			return st, total, err
		}
		if mathrand.IntN(4) == 0 {
			fresh := Parser{token: p.token, probe: p.probe}
			if n, st, err := fresh.Feed(p.Pending()); st != nil || err != nil || n != len(p.Pending()) {
				return nil, total, fmt.Errorf("feed %q again: %+v, %d, %v", p.Pending(), st, n, err)
			}
			*p = fresh
		}
	}
	return nil, total, nil
}

// A rig is a shell on a PTY with its pipes.
type rig struct {
	t             testing.TB
	d             Dialect
	cmd           *exec.Cmd
	commands      *os.File
	reports       *os.File
	master, slave *os.File
	reader        reader
	screen        screen
	last          *State
	exited        chan error
}

type subject struct {
	name string
	path string
	d    Dialect
}

var subjects = []subject{{"bash", "bash", Bash}, {"dash", "dash", Dash}, {"ash", "busybox", Ash}}

// TestMain keeps what the test itself has inherited from the shells.
func TestMain(m *testing.M) {
	_ = unix.CloseRange(3, ^uint(0)>>33, unix.CLOSE_RANGE_CLOEXEC)
	os.Exit(m.Run())
}

// each runs f for all shells.
func each(t *testing.T, f func(t *testing.T, s subject)) {
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			f(t, need(t, s))
		})
	}
}

func need(t testing.TB, s subject) subject {
	t.Helper()
	p, err := exec.LookPath(s.path)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("needs %s", s.path)
		}
		t.Skipf("needs %s", s.path)
	}
	s.path = p
	return s
}

func openPTY(t testing.TB) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	var ioerr error
	if err := conn.Control(func(fd uintptr) {
		if ioerr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); ioerr == nil {
			n, ioerr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}); err != nil || ioerr != nil {
		t.Fatal(err, ioerr)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	attrs, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	attrs.Oflag &^= unix.ONLCR
	attrs.Lflag &^= unix.ECHO
	// Without it the kernel drops output that nobody has read yet at a ^C.
	attrs.Lflag |= unix.NOFLSH
	if err := unix.IoctlSetTermios(int(slave.Fd()), unix.TCSETS, attrs); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// launch starts a shell as d and does no more.
func launch(t testing.TB, path, arg0 string, d Dialect) *rig {
	t.Helper()
	r := &rig{t: t, d: d, exited: make(chan error, 1)}
	r.screen.event = make(chan struct{}, 1)
	r.master, r.slave = openPTY(t)
	cr, cw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	rr, rw, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.commands, r.reports, r.reader = cw, rr, reader{r: rr}
	r.cmd = &exec.Cmd{
		Path: path, Args: append([]string{arg0}, d.Args()...), Dir: t.TempDir(),
		Env:   append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "LC_ALL=C"}, Env()...),
		Stdin: r.slave, Stdout: r.slave, Stderr: r.slave,
		ExtraFiles:  []*os.File{cr, rw},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 1},
	}
	if d.CommandFD() == 0 {
		r.cmd.Stdin, r.cmd.ExtraFiles[0] = cr, nil
	}
	if d.Banner() {
		r.cmd.Stdout, r.cmd.SysProcAttr.Ctty = nil, 2
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = cr.Close(), rw.Close()
	go func() { r.exited <- r.cmd.Wait(); close(r.exited) }()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		b := make([]byte, 65536)
		for {
			n, err := r.master.Read(b)
			_, _ = r.screen.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		<-r.exited
		for _, f := range []*os.File{r.master, r.slave, r.commands, r.reports} {
			_ = f.Close()
		}
		<-copied
	})
	return r
}

// start starts a shell that is ready for steps.
func start(t testing.TB, s subject, last *State) *rig {
	t.Helper()
	r := launch(t, s.path, s.name, s.d)
	r.begin(last)
	return r
}

func (r *rig) begin(last *State) {
	r.t.Helper()
	r.packets()
	token := newToken()
	text, err := r.d.Start(token, last)
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(text)
	if out := r.report(token); out != "" {
		r.t.Fatalf("the start printed %q", out)
	}
}

func (r *rig) packets() {
	r.t.Helper()
	if !r.d.Packets() {
		return
	}
	conn, err := r.commands.SyscallConn()
	if err != nil {
		r.t.Fatal(err)
	}
	var ioerr error
	if err := conn.Control(func(fd uintptr) {
		_, ioerr = unix.FcntlInt(fd, unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK)
	}); err != nil || ioerr != nil {
		r.t.Fatal(err, ioerr)
	}
}

func newToken() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

func (r *rig) send(text Text) {
	r.t.Helper()
	_ = r.commands.SetDeadline(time.Now().Add(patience))
	for _, chunk := range text {
		if _, err := r.commands.Write(chunk); err != nil && !errors.Is(err, unix.EPIPE) {
			r.t.Fatal(err)
		}
	}
}

// report waits for a report and returns what the terminal printed until then.
func (r *rig) report(token string) string {
	r.t.Helper()
	st, err := r.next(token)
	if err != nil {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
		r.t.Fatalf("%v; the terminal has %q; the shell is %.60q", err, r.output(), stat)
	}
	r.last = st
	return r.output()
}

// output returns what was written to the terminal up to now: a mark that is
// written to it comes after all of it.
func (r *rig) output() string {
	r.t.Helper()
	mark := []byte("\x00mark " + newToken())
	if _, err := r.slave.Write(mark); err != nil {
		r.t.Fatal(err)
	}
	out, err := r.screen.until(mark)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(out)
}

func (r *rig) post(command string) (token string) {
	r.t.Helper()
	token = newToken()
	text, err := r.d.Step(command, token, r.last)
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(text)
	return token
}

// next waits for a report.
func (r *rig) next(token string) (*State, error) {
	_ = r.reports.SetDeadline(time.Now().Add(patience))
	return r.reader.next(token)
}

// eventually waits until ok.
func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			r.t.Fatalf("it takes too long until %s; the terminal has %q", what, r.output())
		}
	}
}

// foreground is the name of the program in the foreground of the terminal.
func (r *rig) foreground() string {
	var pgid int
	conn, err := r.master.SyscallConn()
	if err == nil {
		err = conn.Control(func(fd uintptr) { pgid, _ = unix.IoctlGetInt(int(fd), unix.TIOCGPGRP) })
	}
	if err != nil {
		r.t.Fatal(err)
	}
	if pgid != r.cmd.Process.Pid {
		return program(pgid)
	}
	// Without job control what the shell runs is in its own group.
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		r.t.Fatal(err)
	}
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if group, gerr := unix.Getpgid(pid); err == nil && gerr == nil && group == pgid && pid != pgid {
			return program(pid)
		}
	}
	return "shell"
}

func program(pid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name))
}

// forgetful says whether the shell waits for a command and has read all.
func (r *rig) forgetful() bool {
	var number, fd int
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", r.cmd.Process.Pid))
	if err != nil {
		return false
	}
	if n, _ := fmt.Sscanf(string(b), "%d 0x%x", &number, &fd); n < 2 || number != unix.SYS_READ {
		return false
	}
	conn, err := r.commands.SyscallConn()
	if err != nil {
		r.t.Fatal(err)
	}
	var ours, theirs unix.Stat_t
	unread := 1
	err = conn.Control(func(fd uintptr) {
		unread, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		_ = unix.Fstat(int(fd), &ours)
	})
	serr := unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", r.cmd.Process.Pid, fd), &theirs)
	return err == nil && serr == nil && unread == 0 && ours.Ino == theirs.Ino && ours.Dev == theirs.Dev
}

// interrupted waits for the report of a step that ^C has ended, and asks again
// for it, as a holder has to: a ^C that ends a child as well is a second
// interrupt, which may take the shell out of our text.
func (r *rig) interrupted(token string) string {
	r.t.Helper()
	again, err := r.d.Again(token)
	if err != nil {
		r.t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		_ = r.reports.SetDeadline(time.Now().Add(50 * time.Millisecond))
		st, err := r.reader.next(token)
		if err == nil {
			r.last = st
			return r.output()
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			r.t.Fatalf("%v; the terminal has %q", err, r.output())
		}
		if r.forgetful() {
			r.send(again)
		}
	}
	r.t.Fatalf("no report; the terminal has %q", r.output())
	return ""
}

// run runs a step.
func (r *rig) run(command string) (out string, status int) {
	r.t.Helper()
	out = r.report(r.post(command))
	return out, r.last.Status
}

// expect runs a step and compares.
func (r *rig) expect(command, out string, status int) {
	r.t.Helper()
	if got, code := r.run(command); got != out || code != status {
		r.t.Errorf("%q: printed %q with status %d, want %q with %d", clip(command), clip(got), code, clip(out), status)
	}
}

// contains runs a step and looks for a part of what it prints.
func (r *rig) contains(command, part string, status int) {
	r.t.Helper()
	if got, code := r.run(command); !strings.Contains(got, part) || code != status || strings.Contains(got, "printf") {
		r.t.Errorf("%q: printed %q with status %d, want %q in it with %d", clip(command), clip(got), code, part, status)
	}
}

func clip(s string) string {
	if len(s) > 300 {
		return s[:300] + "..."
	}
	return s
}

// dies runs a step that ends the shell.
func (r *rig) dies(command string) *os.ProcessState {
	r.t.Helper()
	token := r.post(command)
	if st, err := r.next(token); err == nil {
		r.t.Fatalf("%q: the shell lives, status %d; it printed %q", command, st.Status, r.output())
	}
	select {
	case <-r.exited:
	case <-time.After(patience):
		r.t.Fatalf("%q: the shell lives", command)
	}
	return r.cmd.ProcessState
}
