package terminal

import (
	"errors"
	"os"
	"sync"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/statefork/statefork/runtime/terminal/shell"
)

// queue writes texts to a shell's command pipe, one after the other: the writes
// of two must not mix. It takes more than a pipe holds, for the shell may read
// it late.
type queue struct {
	file *os.File

	mu    sync.Mutex
	texts []shell.Text
	// idle is closed when all is written; nil before the first text.
	idle chan struct{}
	busy bool
}

// send has a text written.
func (q *queue) send(text shell.Text) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.texts = append(q.texts, text)
	if !q.busy {
		q.busy, q.idle = true, make(chan struct{})
		go q.write()
	}
}

// write writes until there is nothing more.
func (q *queue) write() {
	for {
		q.mu.Lock()
		if len(q.texts) == 0 {
			q.busy, q.texts = false, nil
			close(q.idle)
			q.mu.Unlock()
			return
		}
		text := q.texts[0]
		q.texts = q.texts[1:]
		q.mu.Unlock()
		for _, part := range text {
			if _, err := q.file.Write(part); err != nil {
				if !errors.Is(err, os.ErrClosed) && !errors.Is(err, unix.EPIPE) {
					log.L.WithError(err).Warn("give command to shell")
				}
				break
			}
		}
	}
}

// writing says whether something is still to be written.
func (q *queue) writing() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.busy
}

// written returns a channel that is closed once all that was sent is written,
// or cannot be any more.
func (q *queue) written() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.busy {
		done := make(chan struct{})
		close(done)
		return done
	}
	return q.idle
}
