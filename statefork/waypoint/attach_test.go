package waypoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/statefork/statefork/shim/api"
)

// terminalService is a Waypoint service with one session, whose terminal echoes
// what is typed.
type terminalService struct {
	api.WaypointService
	mu sync.Mutex
	// The rest is guarded by mu; changed is closed and made anew with it.
	changed chan struct{}
	screen  []byte
	// kept is from where on the screen can be read.
	kept   uint64
	typed  []byte
	sizes  []Size
	closed bool
	// revive is what the session has after it was closed, once a restore has
	// been looked for that many times.
	revive    []byte
	restoring int
}

func newTerminalService(screen string) *terminalService {
	return &terminalService{changed: make(chan struct{}), screen: []byte(screen)}
}

func (s *terminalService) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until a condition holds.
func (s *terminalService) await(t *testing.T, holds func() bool) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		s.mu.Lock()
		changed, ok := s.changed, holds()
		s.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("waited too long")
		}
	}
}

func (s *terminalService) ReadScreen(ctx context.Context, r *api.ReadScreenRequest) (*api.ReadScreenResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(r.WaitMs)*time.Millisecond)
	defer cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errgrpc.ToGRPC(fmt.Errorf("session: %w", errdefs.ErrNotFound))
	}
	offset := min(r.Offset, uint64(len(s.screen)))
	for offset == uint64(len(s.screen)) && !s.closed && ctx.Err() == nil {
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	if s.closed {
		return &api.ReadScreenResponse{Offset: offset, Closed: true}, nil
	}
	offset = max(offset, s.kept)
	// Not all that there is, as the shim does it with much.
	part := s.screen[offset:min(offset+1000, uint64(len(s.screen)))]
	return &api.ReadScreenResponse{Output: slices.Clone(part), Offset: offset}, nil
}

func (s *terminalService) List(context.Context, *api.ListRequest) (*api.ListResponse, error) {
	resp := &api.ListResponse{}
	s.change(func() {
		if s.restoring--; s.restoring > 0 {
			resp.Phase = "restore"
		} else if s.revive != nil {
			s.screen, s.revive, s.closed = s.revive, nil, false
		}
	})
	return resp, nil
}

func (s *terminalService) SendInput(_ context.Context, r *api.SendInputRequest) (*api.SendInputResponse, error) {
	if string(r.Input) == "refused" {
		return nil, errgrpc.ToGRPC(fmt.Errorf("session has no shell: %w", errdefs.ErrFailedPrecondition))
	}
	s.change(func() {
		s.typed = append(s.typed, r.Input...)
		s.screen = append(s.screen, r.Input...)
	})
	return &api.SendInputResponse{}, nil
}

func (s *terminalService) ResizeSession(_ context.Context, r *api.ResizeSessionRequest) (*api.ResizeSessionResponse, error) {
	s.change(func() { s.sizes = append(s.sizes, Size{r.Columns, r.Rows}) })
	return &api.ResizeSessionResponse{}, nil
}

// shown is a terminal's screen that can be waited for.
type shown struct {
	mu   sync.Mutex
	text []byte // guarded by mu
	more chan struct{}
}

func (s *shown) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.text = append(s.text, p...)
	s.mu.Unlock()
	select {
	case s.more <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (s *shown) wait(t *testing.T, want string) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		s.mu.Lock()
		got := string(s.text)
		s.mu.Unlock()
		if got == want {
			return
		}
		select {
		case <-s.more:
		case <-deadline:
			t.Fatalf("the terminal shows %q, want %q", got, want)
		}
	}
}

// attached is an Attach that runs.
type attached struct {
	out   *shown
	in    *io.PipeWriter
	sizes chan Size
	done  chan error
}

func attach(t *testing.T, ctx context.Context, s *terminalService) *attached {
	t.Helper()
	c, _ := dialScript(t, s)
	in, typing := io.Pipe()
	a := &attached{out: &shown{more: make(chan struct{}, 1)}, in: typing, sizes: make(chan Size, 1), done: make(chan error, 1)}
	t.Cleanup(func() { typing.Close() })
	a.sizes <- Size{80, 2}
	keys, err := ParseKeys(DefaultDetachKeys)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		a.done <- c.Attach(ctx, AttachOptions{Session: "s", In: in, Out: a.out, Sizes: a.sizes, DetachKeys: keys})
	}()
	return a
}

func (a *attached) typeIn(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(a.in, text); err != nil {
		t.Fatal(err)
	}
}

func (a *attached) ends(t *testing.T) error {
	t.Helper()
	select {
	case err := <-a.done:
		return err
	case <-time.After(10 * time.Second):
		t.Fatal("Attach does not return")
		return nil
	}
}

func TestAttach(t *testing.T) {
	s := newTerminalService(strings.Repeat("old\n", 5000) + "last\r\n$ ")
	a := attach(t, t.Context(), s)
	a.out.wait(t, "last\r\n$ ")
	a.typeIn(t, "ls\n")
	a.out.wait(t, "last\r\n$ ls\r\n")
	a.sizes <- Size{100, 50}
	s.await(t, func() bool { return len(s.sizes) == 2 })
	a.sizes <- Size{} // a terminal that does not know
	a.typeIn(t, "refused")
	a.out.wait(t, "last\r\n$ ls\r\n\a")
	// What was overtaken is told.
	s.change(func() {
		end := uint64(len(s.screen))
		s.screen = append(s.screen, "12345rest"...)
		s.kept = end + 5
	})
	a.out.wait(t, "last\r\n$ ls\r\n\a\r\n[5 bytes were not kept]\r\nrest")
	a.typeIn(t, "x\x10y\x10\x11z")
	if err := a.ends(t); err != nil {
		t.Errorf("Attach = %v, want nil after the detach keys", err)
	}
	if string(s.typed) != "ls\nx\x10y" {
		t.Errorf("typed is %q", s.typed)
	}
	if !slices.Equal(s.sizes, []Size{{80, 2}, {100, 50}}) {
		t.Errorf("sizes are %v", s.sizes)
	}
}

func TestAttachEnds(t *testing.T) {
	t.Run("closed", func(t *testing.T) {
		s := newTerminalService("a")
		a := attach(t, t.Context(), s)
		a.out.wait(t, "a")
		s.change(func() { s.closed = true })
		if err := a.ends(t); !errors.Is(err, ErrClosed) || !errdefs.IsNotFound(err) {
			t.Errorf("Attach = %v, want %v", err, ErrClosed)
		}
	})
	t.Run("not there", func(t *testing.T) {
		s := newTerminalService("a")
		s.closed = true
		if err := attach(t, t.Context(), s).ends(t); !errdefs.IsNotFound(err) {
			t.Errorf("Attach = %v, want not found", err)
		}
	})
	t.Run("restored", func(t *testing.T) {
		s := newTerminalService("late")
		a := attach(t, t.Context(), s)
		a.out.wait(t, "late")
		s.change(func() { s.closed, s.revive, s.restoring = true, []byte("early\n"), 3 })
		a.out.wait(t, "late"+again+"early\r\n")
		// The end of what is typed is not the end.
		a.typeIn(t, "y")
		a.in.Close()
		a.out.wait(t, "late"+again+"early\r\ny")
		s.change(func() { s.closed = true })
		if err := a.ends(t); !errors.Is(err, ErrClosed) {
			t.Errorf("Attach = %v, want %v", err, ErrClosed)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := attach(t, ctx, newTerminalService("a"))
		a.out.wait(t, "a")
		cancel()
		if err := a.ends(t); !errors.Is(err, context.Canceled) {
			t.Errorf("Attach = %v, want %v", err, context.Canceled)
		}
	})
	t.Run("input fails", func(t *testing.T) {
		a := attach(t, t.Context(), newTerminalService("a"))
		a.out.wait(t, "a")
		a.in.CloseWithError(io.ErrNoProgress)
		if err := a.ends(t); !errors.Is(err, io.ErrNoProgress) {
			t.Errorf("Attach = %v, want %v", err, io.ErrNoProgress)
		}
	})
}

func TestNewlines(t *testing.T) {
	for _, tt := range []struct {
		parts []string
		want  string
	}{
		{[]string{"a\nb\n"}, "a\r\nb\r\n"},
		{[]string{"a\r\nb"}, "a\r\nb"},
		{[]string{"a\r", "\nb", "", "\n"}, "a\r\nb\r\n"},
		{[]string{"\n\n", "\n"}, "\r\n\r\n\r\n"},
		{[]string{"\r\n\n\r\r\n"}, "\r\n\r\n\r\r\n"},
		{[]string{"50%\r", "60%\r"}, "50%\r60%\r"},
		{[]string{"a\n\x1b[?10", "49hb\nc\n\x1b[?1049ld\n"}, "a\r\n\x1b[?1049hb\nc\n\x1b[?1049ld\r\n"},
		{[]string{"\x1b[?47h\n\x1b[?47l\n"}, "\x1b[?47h\n\x1b[?47l\r\n"},
	} {
		var out bytes.Buffer
		w := &newlines{w: &out}
		for _, p := range tt.parts {
			if n, err := w.Write([]byte(p)); n != len(p) || err != nil {
				t.Errorf("Write(%q) = %d, %v", p, n, err)
			}
		}
		if out.String() != tt.want {
			t.Errorf("%q became %q, want %q", tt.parts, &out, tt.want)
		}
	}
}

func TestLastLines(t *testing.T) {
	for _, tt := range []struct {
		text string
		n    int
		want string
	}{
		{"", 3, ""}, {"a", 1, "a"}, {"a\n", 1, ""}, {"a\n", 2, "a\n"}, {"a\nb\nc", 2, "b\nc"}, {"a\nb\nc", 9, "a\nb\nc"}, {"\n\n\n", 2, "\n"},
	} {
		if got := lastLines([]byte(tt.text), tt.n); string(got) != tt.want {
			t.Errorf("lastLines(%q, %d) = %q, want %q", tt.text, tt.n, got, tt.want)
		}
	}
}

func TestParseKeys(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "ctrl-p,ctrl-q": "\x10\x11", "a": "a", "ctrl-@,ctrl-[,ctrl-_,ctrl-^,~": "\x00\x1b\x1f\x1e~", "ctrl-A,-": "\x01-",
	} {
		if got, err := ParseKeys(text); err != nil || string(got) != want {
			t.Errorf("ParseKeys(%q) = %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{",", "a,", "ctrl-", "ctrl-1", "ctrl-é", "é", "ab", " ", "ctrl-p ctrl-q", "ctrl-{", "\x01"} {
		if got, err := ParseKeys(text); !errdefs.IsInvalidArgument(err) {
			t.Errorf("ParseKeys(%q) = %q, %v; want an error", text, got, err)
		}
	}
}

func TestKeyFilter(t *testing.T) {
	for _, tt := range []struct {
		keys  string
		parts []string
		want  string
		found bool
	}{
		{"pq", []string{"abc"}, "abc", false},
		{"pq", []string{"ap", "qb"}, "a", true},
		{"pq", []string{"pp", "xpq"}, "ppx", true},
		{"pq", []string{"p"}, "", false}, // held back
		{"aab", []string{"aaab"}, "a", true},
		{"aab", []string{"a", "a", "ca"}, "aac", false},
		{"x", []string{"yx"}, "y", true},
		{"", []string{"p", "q"}, "pq", false},
	} {
		f := keyFilter{keys: []byte(tt.keys)}
		var got []byte
		found := false
		for _, p := range tt.parts {
			rest, ok := f.pass([]byte(p))
			got, found = append(got, rest...), found || ok
		}
		if string(got) != tt.want || found != tt.found {
			t.Errorf("keys %q in %q: %q, %v; want %q, %v", tt.keys, tt.parts, got, found, tt.want, tt.found)
		}
	}
}
