package container

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/containerd/fifo"
)

// targetKind says what takes the output of a process.
type targetKind int

const (
	targetNull   targetKind = iota // nobody
	targetFifo                     // a fifo, or an existing file named like one
	targetFile                     // a file that is made if need be
	targetBinary                   // a logging binary
)

// target is where the output of a process goes.
type target struct {
	kind targetKind
	path string
	// uri is the whole URI of a binary.
	uri *url.URL
}

// parseTarget reads a stream's name: empty, a path, or a URI.
func parseTarget(name string) (target, error) {
	if name == "" {
		return target{}, nil
	}
	u, err := url.Parse(name)
	if err != nil {
		return target{}, fmt.Errorf("parse %q: %w: %w", name, err, errdefs.ErrInvalidArgument)
	}
	switch u.Scheme {
	case "":
		// not u.Path: a path may have any character
		return target{kind: targetFifo, path: name}, nil
	case "fifo":
		return target{kind: targetFifo, path: u.Path}, nil
	case "file":
		return target{kind: targetFile, path: u.Path}, nil
	case "binary", "binary-v2":
		return target{kind: targetBinary, path: u.Path, uri: u}, nil
	}
	return target{}, fmt.Errorf("scheme of %q is none of fifo, file, binary, binary-v2: %w", name, errdefs.ErrInvalidArgument)
}

// open opens the target for writing.
func (t target) open(ctx context.Context) (io.WriteCloser, error) {
	switch t.kind {
	case targetNull:
		return discard{}, nil
	case targetFifo:
		return openFifo(ctx, t.path)
	case targetFile:
		if err := os.MkdirAll(filepath.Dir(t.path), 0o755); err != nil {
			return nil, fmt.Errorf("open output: %w", err)
		}
		return openFile(t.path, os.O_CREATE)
	}
	return nil, fmt.Errorf("a logging binary takes both stdout and stderr, so stdout must name it: %w", errdefs.ErrInvalidArgument)
}

// openFifo waits for a reader, and is then a reader itself: the process goes on
// while its client is away.
func openFifo(ctx context.Context, name string) (io.WriteCloser, error) {
	ok, err := fifo.IsFifo(name)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	if !ok {
		return openFile(name, 0)
	}
	w, err := fifo.OpenFifo(ctx, name, syscall.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open output for writing: %w", err)
	}
	r, err := fifo.OpenFifo(ctx, name, syscall.O_RDONLY, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open output for reading: %w", err), w.Close())
	}
	return &heldFifo{WriteCloser: w, reader: r}, nil
}

func openFile(name string, flag int) (io.WriteCloser, error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|flag, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	return f, nil
}

// heldFifo is a fifo that has a reader at any time.
type heldFifo struct {
	io.WriteCloser
	reader io.Closer
}

func (f *heldFifo) Close() error { return errors.Join(f.WriteCloser.Close(), f.reader.Close()) }

// discard is the output that nobody wants.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) Close() error                { return nil }
