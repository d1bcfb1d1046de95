package container

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// loggerTimeout is how long a logging binary has to end after SIGTERM.
const loggerTimeout = 12 * time.Second

// logger is a logging binary, as containerd defines it: it reads stdout as
// descriptor 3 and stderr as 4, and closes 5 when it is ready.
type logger struct {
	cmd *exec.Cmd
	// stdout and stderr are the writing ends of its pipes.
	stdout, stderr *os.File
	// ended is closed when the process has been reaped.
	ended chan struct{}
}

// loggerCommand makes the command line of a URI: the keys and first values of
// its query are the arguments.
func loggerCommand(uri *url.URL, id, namespace string) *exec.Cmd {
	var args []string
	query := uri.Query()
	for _, k := range slices.Sorted(maps.Keys(query)) {
		args = append(args, k)
		if v := query[k]; len(v) > 0 {
			args = append(args, v[0])
		}
	}
	cmd := exec.Command(uri.Path, args...)
	cmd.Env = []string{"CONTAINER_ID=" + id, "CONTAINER_NAMESPACE=" + namespace}
	return cmd
}

// startLogger starts the logging binary and waits until it is ready.
func (s *stdio) startLogger(c *Container, t target) (retErr error) {
	l := &logger{cmd: loggerCommand(t.uri, c.id, c.namespace), ended: make(chan struct{})}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			closeQuietly(f)
		}
		if retErr != nil {
			for _, f := range []*os.File{l.stdout, l.stderr} {
				if f != nil {
					closeQuietly(f)
				}
			}
		}
	}()
	for _, end := range []**os.File{&l.stdout, &l.stderr} {
		r, w, err := newPipe()
		if err != nil {
			return err
		}
		*end = w
		theirs = append(theirs, r)
	}
	ready, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	theirs = append(theirs, w)
	l.cmd.ExtraFiles = theirs
	if err := l.cmd.Start(); err != nil {
		return fmt.Errorf("start logging binary: %w", err)
	}
	go func() {
		// Its exit status means nothing to the container.
		_ = l.cmd.Wait()
		close(l.ended)
	}()
	closeQuietly(w)
	if err := waitReady(ready, t.uri.Scheme == "binary-v2"); err != nil {
		return errors.Join(err, l.stop())
	}
	s.logger = l
	s.closers = append(s.closers, l.stdout, l.stderr)
	return nil
}

// waitReady waits for the logging binary's word. In the second version of the
// protocol that is a byte, so that a crash can be told from it.
func waitReady(r io.Reader, strict bool) error {
	n, err := r.Read(make([]byte, 1))
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("wait for logging binary: %w", err)
	}
	if strict && n == 0 {
		return errors.New("logging binary ended or closed its descriptor 5 without being ready")
	}
	return nil
}

// stop asks the logging binary, whose pipes have ended, to end as well.
func (l *logger) stop() error {
	signal := func(sig unix.Signal) error {
		err := l.cmd.Process.Signal(sig)
		if errors.Is(err, os.ErrProcessDone) {
			return nil
		}
		return err
	}
	if err := signal(unix.SIGTERM); err != nil {
		return fmt.Errorf("end logging binary: %w", err)
	}
	timer := time.NewTimer(loggerTimeout)
	defer timer.Stop()
	select {
	case <-l.ended:
		return nil
	case <-timer.C:
	}
	if err := signal(unix.SIGKILL); err != nil {
		return fmt.Errorf("kill logging binary: %w", err)
	}
	<-l.ended
	return nil
}
