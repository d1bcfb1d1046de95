package terminal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"
)

// Terminals that a shell has left.
//
// When a shell ends, or its session is closed, what it has started in the
// background may have its terminal open for much longer. The terminal stays as
// long as that: without it the container could not be checkpointed any more, and
// these programs would fail to print.

// keepTerminal keeps the terminal of a shell that has ended, if somebody still
// has it open. What is printed goes to sink.
func (t *Set) keepTerminal(l *line, sink func([]byte)) error {
	users, err := t.users()
	if err != nil {
		return err
	}
	if !users[l.pty.device()] {
		return nil
	}
	master, err := duplicate(l.Master)
	if err != nil {
		return err
	}
	return t.addLeft(master, sink)
}

// addLeft takes a master over.
func (t *Set) addLeft(master *os.File, sink func([]byte)) error {
	p, err := newPTY(master, sink)
	if err != nil {
		return errors.Join(err, master.Close())
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return p.close()
	}
	l := &leftTerminal{pty: p, done: make(chan struct{})}
	t.left = append(t.left, l)
	go func() {
		defer close(l.done)
		if err := p.read(); err != nil {
			log.L.WithError(err).Warn("read terminal that its shell has left")
		}
	}()
	return nil
}

// leftTerminal is read until it is closed; done is closed then.
type leftTerminal struct {
	*pty
	done chan struct{}
}

func (l *leftTerminal) end() error {
	err := l.close()
	<-l.done
	return err
}

// leftInUse closes the terminals that nobody has open any more, and returns
// the others.
func (t *Set) leftInUse() ([]*pty, error) {
	t.mu.Lock()
	none := len(t.left) == 0
	t.mu.Unlock()
	if none {
		return nil, nil
	}
	users, err := t.users()
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var used []*leftTerminal
	var ptys []*pty
	for _, l := range t.left {
		if users[l.device()] {
			used, ptys = append(used, l), append(ptys, l.pty)
		} else if err := l.end(); err != nil {
			log.L.WithError(err).Warn("close terminal that its shell has left")
		}
	}
	t.left = used
	return ptys, nil
}

// closeLeft closes all of them.
func (t *Set) closeLeft() error {
	t.mu.Lock()
	left := t.left
	t.left = nil
	t.mu.Unlock()
	var errs []error
	for _, l := range left {
		errs = append(errs, l.end())
	}
	return errors.Join(errs...)
}

// users returns the terminals that processes of the container have open.
func (t *Set) users() (map[device]bool, error) {
	pids, err := t.host.Processes()
	if err != nil {
		return nil, err
	}
	open := map[device]bool{}
	for _, pid := range pids {
		fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			// Only to save looking at all the others.
			if to, err := os.Readlink(fd); err != nil || !strings.HasPrefix(to, "/dev/pts/") {
				continue
			}
			var st unix.Stat_t
			if err := unix.Stat(fd, &st); err == nil {
				open[deviceOf(st)] = true
			}
		}
	}
	return open, nil
}
