package waypoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/statefork/statefork/shim/api"
)

// screenful is how much is read back at most to show the last lines.
const screenful = 16 << 10

// restoreLook is how often it is looked whether a restore is over.
const restoreLook = 50 * time.Millisecond

// ErrClosed says that a session was closed while somebody was attached.
var ErrClosed = fmt.Errorf("session was closed: %w", errdefs.ErrNotFound)

// bell is what a terminal sounds when it does not take a key.
var bell = []byte{'\a'}

// AttachOptions are a person's terminal.
type AttachOptions struct {
	// Session is by default MainSession.
	Session string
	// In is what is typed; its end is not the end of Attach. A read of it may
	// still be under way when Attach returns.
	In io.Reader
	// Out shows what the session's programs print. It must be raw: the bytes are
	// for the terminal itself.
	Out io.Writer
	// Sizes are the terminal's, the first one and those that it changes to.
	Sizes <-chan Size
	// DetachKeys end Attach, and are not sent; see ParseKeys.
	DetachKeys []byte
}

// Attach connects a terminal to a session's: it shows the last screenful and
// what follows, and types what is typed. It returns nil when the detach keys
// are typed, ErrClosed when the session is closed, and else the error that
// ended it.
func (s *Sessions) Attach(ctx context.Context, o AttachOptions) error {
	ctx, cancel := context.WithCancelCause(ctx)
	a := &attachment{AttachOptions: o, s: s, out: &newlines{w: o.Out}, rows: 24}
	var sizes sync.WaitGroup
	defer func() {
		cancel(nil)
		sizes.Wait()
	}()
	if o.Sizes != nil {
		select {
		case size := <-o.Sizes:
			if size.Rows > 0 {
				a.rows = size.Rows
			}
			if err := a.resize(ctx, size); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
		sizes.Go(func() { cancel(a.followSize(ctx)) })
	}
	if o.In != nil {
		go func() {
			// The end of what is typed is nothing to end for.
			if err := a.typeIn(ctx); !errors.Is(err, io.EOF) {
				cancel(err)
			}
		}()
	}
	err := a.show(ctx)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if errors.Is(err, errDetached) {
		return nil
	}
	return err
}

var errDetached = errors.New("detached")

type attachment struct {
	AttachOptions
	s    *Sessions
	out  *newlines
	rows uint32
}

func (a *attachment) resize(ctx context.Context, size Size) error {
	if size.Columns == 0 || size.Rows == 0 {
		return nil // a terminal that does not know
	}
	return a.s.Resize(ctx, a.Session, size)
}

// followSize returns when there is nothing more to do, with a reason or when
// ctx ends.
func (a *attachment) followSize(ctx context.Context) error {
	for {
		select {
		case size, ok := <-a.Sizes:
			if !ok {
				<-ctx.Done()
				return nil
			}
			if err := a.resize(ctx, size); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// typeIn types until there is nothing more to type.
func (a *attachment) typeIn(ctx context.Context) error {
	filter := keyFilter{keys: a.DetachKeys}
	buf := make([]byte, 4<<10)
	for {
		n, rerr := a.In.Read(buf)
		typed, found := filter.pass(buf[:n])
		if err := a.s.Send(ctx, a.Session, typed); err != nil {
			if !refused(err) {
				return err
			}
			if _, err := a.out.Write(bell); err != nil {
				return fmt.Errorf("write to terminal: %w", err)
			}
		}
		switch {
		case found:
			return errDetached
		case errors.Is(rerr, io.EOF):
			return io.EOF
		case rerr != nil:
			return fmt.Errorf("read from terminal: %w", rerr)
		}
	}
}

// refused says that the session does not take what was typed: it has no shell
// at the moment, or the line is too long.
func refused(err error) bool {
	return errdefs.IsFailedPrecondition(err) || errdefs.IsInvalidArgument(err)
}

// show writes what the session prints until it is closed.
func (a *attachment) show(ctx context.Context) error {
	next, err := a.showLast(ctx, "")
	if err != nil {
		return err
	}
	for {
		p, err := a.s.Screen(ctx, a.Session, next, pollWait)
		if errdefs.IsNotFound(err) {
			p, err = &Piece{Offset: next, Next: next, End: true}, nil
		}
		if err != nil {
			return err
		}
		if p.Offset > next && len(p.Data) > 0 {
			if _, err := fmt.Fprintf(a.out, "\r\n[%d bytes were not kept]\r\n", p.Offset-next); err != nil {
				return fmt.Errorf("write to terminal: %w", err)
			}
		}
		if _, err := a.out.Write(p.Data); err != nil {
			return fmt.Errorf("write to terminal: %w", err)
		}
		next = p.Next
		if !p.End {
			continue
		}
		// A restore has the session end as well, and begin anew.
		if err := a.quiet(ctx); err != nil {
			return err
		}
		if next, err = a.showLast(ctx, again); errdefs.IsNotFound(err) {
			return ErrClosed
		}
		if err != nil {
			return err
		}
	}
}

// quiet waits until no restore of the container is under way: in its middle
// there are no sessions.
func (a *attachment) quiet(ctx context.Context) error {
	tick := time.NewTicker(restoreLook)
	defer tick.Stop()
	for {
		state, err := a.s.shim.List(ctx)
		if err != nil {
			return a.s.explain(err)
		}
		if state.Phase == "" {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// again tells where a session goes on that has begun anew.
const again = "\r\n[the session is as it was at a node, or new]\r\n"

// showLast writes the last screenful under a title, and returns where the
// present end is.
func (a *attachment) showLast(ctx context.Context, title string) (uint64, error) {
	end, err := a.s.Screen(ctx, a.Session, api.EndOffset, 0)
	if err != nil {
		return 0, err
	}
	if end.End {
		return 0, ErrClosed
	}
	var shown []byte
	next := end.Next - min(end.Next, screenful)
	for next < end.Next {
		p, err := a.s.Screen(ctx, a.Session, next, 0)
		if err != nil {
			return 0, err
		}
		if len(p.Data) == 0 {
			break
		}
		if p.Offset > next {
			shown = nil
		}
		shown, next = append(shown, p.Data...), p.Next
	}
	if _, err := a.out.Write(append([]byte(title), lastLines(shown, int(a.rows))...)); err != nil {
		return 0, fmt.Errorf("write to terminal: %w", err)
	}
	return next, nil
}

// lastLines returns the last n lines of p; the last one need not be complete.
func lastLines(p []byte, n int) []byte {
	at := len(p)
	for range n {
		i := bytes.LastIndexByte(p[:at], '\n')
		if i < 0 {
			return p
		}
		at = i
	}
	return p[at+1:]
}

// newlines writes to a raw terminal what was printed on one that does not turn
// "\n" into "\r\n". Programs that have taken the whole screen mean what they
// print: to them "\n" alone is a way down.
// It may be used by several goroutines.
type newlines struct {
	w  io.Writer
	mu sync.Mutex
	// The rest is guarded by mu.

	last  []byte // as many bytes as the switch to the other screen has
	whole bool   // a program has the whole screen
}

// What switches to the other screen, before "h", and back, before "l". The first
// is what all terminals of today use.
var otherScreen = [][]byte{[]byte("\x1b[?1049"), []byte("\x1b[?1047"), []byte("\x1b[?47")}

// note takes a byte that is printed.
func (n *newlines) note(c byte) {
	if c == 'h' || c == 'l' {
		for _, s := range otherScreen {
			if bytes.HasSuffix(n.last, s) {
				n.whole = c == 'h'
			}
		}
	}
	if n.last = append(n.last, c); len(n.last) > len(otherScreen[0]) {
		n.last = n.last[1:]
	}
}

func (n *newlines) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]byte, 0, len(p)+16)
	for _, c := range p {
		if c == '\n' && !n.whole && !bytes.HasSuffix(n.last, []byte{'\r'}) {
			out = append(out, '\r')
		}
		out = append(out, c)
		n.note(c)
	}
	if len(out) == 0 {
		return 0, nil
	}
	if _, err := n.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}
