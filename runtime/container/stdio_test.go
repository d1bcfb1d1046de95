package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/fifo"
)

func TestParseTarget(t *testing.T) {
	for in, want := range map[string]target{
		"":                          {kind: targetNull},
		"/run/a b%20":               {kind: targetFifo, path: "/run/a b%20"},
		"fifo:///run/x":             {kind: targetFifo, path: "/run/x"},
		"file:///var/log/x":         {kind: targetFile, path: "/var/log/x"},
		"binary:///usr/bin/l?a=b":   {kind: targetBinary, path: "/usr/bin/l"},
		"binary-v2:///usr/bin/l?c=": {kind: targetBinary, path: "/usr/bin/l"},
	} {
		got, err := parseTarget(in)
		if err != nil {
			t.Errorf("%q: %v", in, err)
			continue
		}
		if (got.uri != nil) != (want.kind == targetBinary) {
			t.Errorf("%q: uri is %v", in, got.uri)
		}
		got.uri = nil
		if got != want {
			t.Errorf("%q: got %+v, want %+v", in, got, want)
		}
	}
	for _, in := range []string{"npipe://x", "http://host/x", "file://%zz"} {
		if _, err := parseTarget(in); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: got %v, want an invalid argument", in, err)
		}
	}
}

func TestLoggerCommand(t *testing.T) {
	u, err := url.Parse("binary:///bin/logger?b=2&a=1&empty=")
	if err != nil {
		t.Fatal(err)
	}
	cmd := loggerCommand(u, "id", "ns")
	if want := []string{"/bin/logger", "a", "1", "b", "2", "empty", ""}; !reflect.DeepEqual(cmd.Args, want) {
		t.Errorf("arguments are %q, want %q", cmd.Args, want)
	}
	if want := []string{"CONTAINER_ID=id", "CONTAINER_NAMESPACE=ns"}; !reflect.DeepEqual(cmd.Env, want) {
		t.Errorf("environment is %q", cmd.Env)
	}
}

// openTest opens standard streams as a container of this process' user would.
func openTest(t *testing.T, want Stdio) *stdio {
	t.Helper()
	c := &Container{id: "id", namespace: "ns", ioUID: os.Getuid(), ioGID: os.Getgid()}
	s, err := c.openStdio(context.Background(), want)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func drained(t *testing.T, s *stdio) {
	t.Helper()
	s.finish()
	if err := s.drain(context.Background(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
}

func TestNullStreams(t *testing.T) {
	s := openTest(t, Stdio{})
	ends := s.containerEnds()
	if len(ends) != 3 {
		t.Fatalf("there are %d ends, want all three", len(ends))
	}
	if n, err := ends[0].Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("stdin: read %d, %v; want its end", n, err)
	}
	// More than any pipe holds: somebody reads it.
	big := make([]byte, 1<<20)
	for fd := 1; fd <= 2; fd++ {
		if _, err := ends[fd].Write(big); err != nil {
			t.Errorf("descriptor %d: %v", fd, err)
		}
	}
	drained(t, s)
}

func TestFileStreams(t *testing.T) {
	name := filepath.Join(t.TempDir(), "made", "log")
	s := openTest(t, Stdio{Stdout: "file://" + name, Stderr: "file://" + name})
	for fd := 1; fd <= 2; fd++ {
		if _, err := fmt.Fprintf(s.ends[fd], "line of %d\n", fd); err != nil {
			t.Fatal(err)
		}
	}
	drained(t, s)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"line of 1\n", "line of 2\n"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("log is %q, want %q in it", b, want)
		}
	}
}

func TestFifoStreams(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	dir := t.TempDir()
	want := Stdio{Stdin: filepath.Join(dir, "in"), Stdout: filepath.Join(dir, "out")}
	open := func(name string, flag int) io.ReadWriteCloser {
		f, err := fifo.OpenFifo(ctx, name, flag|syscall.O_CREAT|syscall.O_NONBLOCK, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	in, out := open(want.Stdin, syscall.O_WRONLY), open(want.Stdout, syscall.O_RDONLY)
	defer out.Close()
	s := openTest(t, want)
	if _, err := in.Write([]byte("question\n")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	if n, err := s.ends[0].Read(buf); err != nil || string(buf[:n]) != "question\n" {
		t.Errorf("stdin: read %q, %v", buf[:n], err)
	}
	// The client's end alone does not end the input.
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	in = open(want.Stdin, syscall.O_WRONLY)
	if _, err := in.Write([]byte("more\n")); err != nil {
		t.Fatal(err)
	}
	if n, err := s.ends[0].Read(buf); err != nil || string(buf[:n]) != "more\n" {
		t.Errorf("stdin of the next client: read %q, %v", buf[:n], err)
	}
	if err := errors.Join(s.closeStdin(), in.Close()); err != nil {
		t.Fatal(err)
	}
	if n, err := s.ends[0].Read(buf); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("closed stdin: read %d, %v; want its end", n, err)
	}
	if _, err := s.ends[1].Write([]byte("answer\n")); err != nil {
		t.Fatal(err)
	}
	drained(t, s)
	if got, err := io.ReadAll(out); err != nil || string(got) != "answer\n" {
		t.Errorf("stdout: read %q, %v", got, err)
	}
}

// TestBinaryStreams has a shell be the logging binary.
func TestBinaryStreams(t *testing.T) {
	name := filepath.Join(t.TempDir(), "log")
	script := "echo $CONTAINER_NAMESPACE/$CONTAINER_ID >" + name + "; echo >&5; exec 5>&-; cat <&3 >>" + name + "; cat <&4 >>" + name
	for _, scheme := range []string{"binary", "binary-v2"} {
		uri := scheme + ":///bin/sh?-c=" + url.QueryEscape(script)
		s := openTest(t, Stdio{Stdout: uri, Stderr: uri})
		for fd := 1; fd <= 2; fd++ {
			if _, err := fmt.Fprintf(s.ends[fd], "line of %d\n", fd); err != nil {
				t.Fatal(err)
			}
		}
		s.finish()
		<-s.logger.ended
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if want := "ns/id\nline of 1\nline of 2\n"; string(b) != want {
			t.Errorf("%s: log is %q, want %q", scheme, b, want)
		}
	}
}

func TestBinaryThatFails(t *testing.T) {
	c := &Container{id: "id", namespace: "ns", ioUID: os.Getuid(), ioGID: os.Getgid()}
	if _, err := c.openStdio(context.Background(), Stdio{Stdout: "binary-v2:///bin/false"}); err == nil {
		t.Error("a logging binary that was never ready was taken")
	}
	if _, err := c.openStdio(context.Background(), Stdio{Stderr: "binary:///bin/cat"}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a logging binary for stderr alone: got %v", err)
	}
}

// full is a disk without space.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestFullDiskDoesNotStopTheContainer(t *testing.T) {
	src := strings.NewReader(strings.Repeat("x", 1<<20))
	copyOutput(full{}, src)
	if src.Len() != 0 {
		t.Errorf("%d bytes were not read", src.Len())
	}
}
