package container

import (
	"bufio"
	"errors"
	"io"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openPTY returns both sides of a terminal that changes nothing on its way.
func openPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(int(n)), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeQuietly(slave) })
	raw, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ICANON
	if err := unix.IoctlSetTermios(int(slave.Fd()), unix.TCSETS, raw); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), "ptmx"), slave
}

func sizeOf(t *testing.T, slave *os.File) [2]uint16 {
	t.Helper()
	ws, err := unix.IoctlGetWinsize(int(slave.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		t.Fatal(err)
	}
	return [2]uint16{ws.Col, ws.Row}
}

// TestReplaceConsole has a terminal go on with another master: nothing of the
// old one is lost, input waits for the new one, the window keeps its size.
func TestReplaceConsole(t *testing.T) {
	s := &stdio{console: newConsole()}
	r, w := io.Pipe()
	s.outputs.Go(func() {
		s.console.copyOutput(w)
		w.Close()
	})
	lines := bufio.NewReader(r)
	next := func() string {
		t.Helper()
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return line
	}
	master, slave := openPTY(t)
	if err := s.attachConsole(master); err != nil {
		t.Fatal(err)
	}
	if err := s.resize(91, 17); err != nil {
		t.Fatal(err)
	}
	if got := sizeOf(t, slave); got != [2]uint16{91, 17} {
		t.Errorf("window is %v", got)
	}
	if _, err := slave.WriteString("first\n"); err != nil {
		t.Fatal(err)
	}
	if got := next(); got != "first\n" {
		t.Errorf("read %q", got)
	}
	// The generation dies with something in the terminal.
	s.holdInput(true)
	if _, err := slave.WriteString("last words\n"); err != nil {
		t.Fatal(err)
	}
	closeQuietly(slave)
	if got := next(); got != "last words\n" {
		t.Errorf("read %q", got)
	}
	written := make(chan error, 1)
	go func() {
		_, err := s.console.Write([]byte("typed in between\n"))
		written <- err
	}()
	master, slave = openPTY(t)
	if err := s.replaceConsole(master); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	if n, err := slave.Read(buf); err != nil || string(buf[:n]) != "typed in between\n" {
		t.Errorf("input of the new terminal is %q, %v", buf[:n], err)
	}
	if got := sizeOf(t, slave); got != [2]uint16{91, 17} {
		t.Errorf("window of the new terminal is %v", got)
	}
	if _, err := slave.WriteString("second\n"); err != nil {
		t.Fatal(err)
	}
	if got := next(); got != "second\n" {
		t.Errorf("read %q", got)
	}
	closeQuietly(slave)
	s.finish()
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	if err := s.close(); err != nil {
		t.Error(err)
	}
	if _, err := s.console.Write([]byte("x")); err == nil {
		t.Error("a closed terminal took input")
	}
}

// TestCloseConsole hangs up on a process that has its side open.
func TestCloseConsole(t *testing.T) {
	s := &stdio{console: newConsole()}
	s.outputs.Go(func() { s.console.copyOutput(io.Discard) })
	master, slave := openPTY(t)
	if err := s.attachConsole(master); err != nil {
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	if err := slave.SetDeadline(time.Now().Add(10 * time.Second)); err != nil && !errors.Is(err, os.ErrNoDeadline) {
		t.Fatal(err)
	}
	if n, err := slave.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d, %v from a terminal that was hung up", n, err)
	}
}
