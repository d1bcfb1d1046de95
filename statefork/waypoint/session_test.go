package waypoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"

	"github.com/statefork/statefork/shim/api"
	"github.com/statefork/statefork/statefork"
)

// script is a Waypoint service whose steps answer as a test says: start first,
// then one of waits for each call. It keeps what it was asked.
type script struct {
	api.WaypointService
	start *api.StepResponse
	waits []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error)

	mu      sync.Mutex
	started []*api.StartStepRequest // guarded by mu, as all that follows
	waited  []*api.WaitStepRequest
	sent    [][]byte
	signals []uint32
}

func (s *script) StartStep(_ context.Context, r *api.StartStepRequest) (*api.StepResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = append(s.started, r)
	if s.start == nil {
		return nil, errgrpc.ToGRPC(fmt.Errorf("session %q is busy: %w", r.Session, errdefs.ErrFailedPrecondition))
	}
	return s.start, nil
}

func (s *script) WaitStep(ctx context.Context, r *api.WaitStepRequest) (*api.StepResponse, error) {
	s.mu.Lock()
	n := len(s.waited)
	s.waited = append(s.waited, r)
	s.mu.Unlock()
	if n >= len(s.waits) {
		return nil, errgrpc.ToGRPC(fmt.Errorf("call %d is not in the script: %w", n, errdefs.ErrInternal))
	}
	resp, err := s.waits[n](ctx, r)
	return resp, errgrpc.ToGRPC(err)
}

func (s *script) SendInput(_ context.Context, r *api.SendInputRequest) (*api.SendInputResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, r.Input)
	return &api.SendInputResponse{}, nil
}

func (s *script) SignalSession(_ context.Context, r *api.SignalSessionRequest) (*api.SignalSessionResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.signals = append(s.signals, r.Signal)
	return &api.SignalSessionResponse{}, nil
}

// at answers at once.
func at(r *api.StepResponse) func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) {
	return func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) { return r, nil }
}

// later answers when the call has taken all its time.
func later(r *api.StepResponse) func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) {
	return func(ctx context.Context, q *api.WaitStepRequest) (*api.StepResponse, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(q.WaitMs)*time.Millisecond)
		defer cancel()
		<-ctx.Done()
		return r, nil
	}
}

// dialScript serves a Waypoint service at the socket of a task, and connects to
// it.
func dialScript(t *testing.T, s api.WaypointService) (*Sessions, *ttrpc.Server) {
	t.Helper()
	// A socket's path may have 107 bytes.
	dir, err := os.MkdirTemp("", "sf")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bundle := filepath.Join(dir, "io.containerd.runtime.v2.task", "default", "c1")
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	boot := fmt.Sprintf(`{"version": 3, "protocol": "ttrpc", "address": "unix://%s"}`, l.Addr())
	if err := os.WriteFile(filepath.Join(bundle, "bootstrap.json"), []byte(boot), 0o600); err != nil {
		t.Fatal(err)
	}
	srv, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterWaypointService(srv, s)
	done := make(chan error, 1)
	go func() { done <- srv.Serve(context.Background(), l) }()
	t.Cleanup(func() {
		srv.Close()
		if err := <-done; !errors.Is(err, ttrpc.ErrServerClosed) {
			t.Error(err)
		}
	})
	shim, err := api.Dial(t.Context(), api.Config{State: dir, Namespace: "default", ContainerID: "c1"})
	if err != nil {
		t.Fatal(err)
	}
	sessions := &Sessions{shim: shim, rec: containers.Container{ID: "c1"}}
	t.Cleanup(func() { sessions.Close() })
	return sessions, srv
}

// TestExecQuick has a step that has ended when the first call returns.
func TestExecQuick(t *testing.T) {
	s := &script{start: &api.StepResponse{
		Session: "main", Step: 3, Generation: 2, Ended: true, ExitCode: 137, ExitKnown: true, Signal: 9, TimedOut: true,
		ShellExited: true, NewShell: true, Cwd: "/srv", DurationUs: 1500, OutputBytes: 5, Output: []byte("a\xff\xc3\xa9\n"),
	}}
	c, _ := dialScript(t, s)
	var out bytes.Buffer
	res, err := c.Exec(t.Context(), ExecOptions{
		Command: "kill -9 $$", Timeout: time.Microsecond, IdleTimeout: 2 * time.Second, OutputLimit: 9999,
		FollowOptions: FollowOptions{Output: &out},
	})
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != "a\xff\xc3\xa9\n" || len(s.waited) != 0 {
		t.Errorf("Exec wrote %q after %d more calls", &out, len(s.waited))
	}
	r := s.started[0]
	if r.ContainerId != "c1" || string(r.Command) != "kill -9 $$" || r.TimeoutMs != 1 || r.IdleTimeoutMs != 2000 || r.OutputLimit != 9999 || r.WaitMs != 200 || r.Background {
		t.Errorf("the shim was asked %v", r)
	}
	got, err := json.Marshal(res)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"session":"main","step":3,"generation":2,"exit_code":137,"exit_known":true,"signal":"SIGKILL","timed_out":true,` +
		`"still_running":false,"waiting_for_input":false,"truncated":false,"shell_exited":true,"new_shell":true,"duration_ns":1500000,"cwd":"/srv",` +
		`"output_bytes":5,"output_offset":0,"next_offset":5,"dropped_bytes":0,"output":"Yf/DqQo=","text":"a` + "\ufffd" + `é\n"}`
	if string(got) != want {
		t.Errorf("result is\n%s, want\n%s", got, want)
	}
}

// TestExecStreams assembles the output of several calls. One piece is told
// twice, and the last comes only after the end.
func TestExecStreams(t *testing.T) {
	run := api.StepResponse{Session: "main", Step: 1, Generation: 4}
	s := &script{
		start: &api.StepResponse{Session: run.Session, Step: run.Step, Generation: run.Generation, Output: []byte("one"), OutputBytes: 3},
		waits: []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error){
			at(&api.StepResponse{Output: []byte("etwo"), Offset: 2, OutputBytes: 6}),
			at(&api.StepResponse{OutputBytes: 6}),
			at(&api.StepResponse{Output: []byte("th"), Offset: 6, OutputBytes: 11, Ended: true, ExitKnown: true}),
			at(&api.StepResponse{Output: []byte("ree"), Offset: 8, OutputBytes: 11, Ended: true, ExitKnown: true}),
		},
	}
	c, _ := dialScript(t, s)
	var out bytes.Buffer
	var known []StepRef
	res, err := c.Exec(t.Context(), ExecOptions{FollowOptions: FollowOptions{
		Output: &out, Known: func(r StepRef) { known = append(known, r) },
	}})
	if err != nil || out.String() != "onetwothree" || res.Text != "onetwothree" || string(res.Output) != "onetwothree" || res.StillRunning || !res.ExitKnown {
		t.Errorf("Exec = %+v, %v; it wrote %q", res, err, &out)
	}
	if !slices.Equal(known, []StepRef{{"main", 1, 4}}) {
		t.Errorf("known is %v", known)
	}
	var offsets []uint64
	for _, r := range s.waited {
		offsets = append(offsets, r.Offset)
		if r.Session != "main" || r.Step != 1 || r.Generation != 4 || r.AnyGeneration || r.WaitMs != 30000 {
			t.Errorf("the shim was asked %v", r)
		}
	}
	if !slices.Equal(offsets, []uint64{3, 6, 6, 8}) {
		t.Errorf("output was asked for from %v", offsets)
	}
}

// TestExecFails has errors in the middle of a step.
func TestExecFails(t *testing.T) {
	fail := func(err error) func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) {
		return func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) { return nil, err }
	}
	for _, tt := range []struct {
		name   string
		wait   func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error)
		is     func(error) bool
		result bool
		hint   string
	}{
		{"stale", at(&api.StepResponse{Stale: true, Generation: 5}), func(err error) bool { return errors.Is(err, api.ErrStale) }, false, "session ls c1"},
		{"gone", fail(fmt.Errorf("step 1: %w", errdefs.ErrNotFound)), errdefs.IsNotFound, false, ""},
		{"short", at(&api.StepResponse{Ended: true, OutputBytes: 9}), errdefs.IsDataLoss, true, ""},
		{"old shim", fail(fmt.Errorf("no such method: %w", errdefs.ErrNotImplemented)), errdefs.IsNotImplemented, true, "restart the container"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &script{
				start: &api.StepResponse{Session: "main", Step: 1, Generation: 4, Output: []byte("one"), OutputBytes: 3},
				waits: []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error){tt.wait},
			}
			c, _ := dialScript(t, s)
			res, err := c.Exec(t.Context(), ExecOptions{})
			if !tt.is(err) || (res != nil) != tt.result || !strings.Contains(statefork.Hint(err), tt.hint) {
				t.Errorf("Exec = %+v, %v; hint %q", res, err, statefork.Hint(err))
			}
			if res != nil && res.Text != "one" {
				t.Errorf("the result has the output %q", res.Text)
			}
		})
	}
	c, _ := dialScript(t, &script{})
	if res, err := c.Exec(t.Context(), ExecOptions{}); res != nil || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Exec in a busy session = %v, %v", res, err)
	}
}

// brokenWriter takes nothing.
type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestExecBrokenWriter(t *testing.T) {
	c, _ := dialScript(t, &script{start: &api.StepResponse{Step: 1, Output: []byte("one"), OutputBytes: 3}})
	res, err := c.Exec(t.Context(), ExecOptions{FollowOptions: FollowOptions{Output: brokenWriter{}}})
	if !errors.Is(err, syscall.EPIPE) || res == nil || !res.StillRunning {
		t.Errorf("Exec = %+v, %v", res, err)
	}
}

// TestExecGivesUp ends the waiting, by ctx and by the end of the shim.
func TestExecGivesUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	released := make(chan struct{})
	hang := func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) {
		cancel()
		<-released
		return &api.StepResponse{}, nil
	}
	s := &script{
		start: &api.StepResponse{Session: "main", Step: 6, Output: []byte("one"), OutputBytes: 3},
		waits: []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error){hang},
	}
	c, srv := dialScript(t, s)
	res, err := c.Exec(ctx, ExecOptions{})
	close(released)
	if !errors.Is(err, context.Canceled) || res == nil || res.Step != 6 || !res.StillRunning || res.NextOffset != 3 || res.Text != "one" {
		t.Errorf("Exec, cancelled = %+v, %v", res, err)
	}
	if len(s.signals) != 0 {
		t.Errorf("the step got the signals %v", s.signals)
	}

	s.mu.Lock()
	s.waits = append(s.waits, func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error) {
		go srv.Close()
		return later(&api.StepResponse{})(context.Background(), &api.WaitStepRequest{WaitMs: 200})
	})
	s.mu.Unlock()
	res, err = c.Exec(t.Context(), ExecOptions{})
	if !errors.Is(err, api.ErrGone) || !errdefs.IsUnavailable(err) || res == nil || statefork.Hint(err) == "" {
		t.Errorf("Exec of a shim that dies = %+v, %v; hint %q", res, err, statefork.Hint(err))
	}
}

// TestReturnsEarly has steps that go on when the call returns.
func TestReturnsEarly(t *testing.T) {
	type waits = []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error)
	running := &api.StepResponse{Session: "main", Step: 2, OutputBytes: 2, Output: []byte("? ")}
	asks := &api.StepResponse{Session: "main", Step: 2, OutputBytes: 2, WaitingForInput: true}
	ended := &api.StepResponse{Session: "main", Step: 2, OutputBytes: 2, Ended: true, ExitKnown: true}

	t.Run("input", func(t *testing.T) {
		s := &script{start: running, waits: waits{at(asks)}}
		c, _ := dialScript(t, s)
		res, err := c.Exec(t.Context(), ExecOptions{FollowOptions: FollowOptions{ReturnOnInput: true}})
		if err != nil || !res.WaitingForInput || !res.StillRunning || res.ExitKnown || res.Text != "? " {
			t.Errorf("Exec = %+v, %v", res, err)
		}
	})
	t.Run("input is not looked for", func(t *testing.T) {
		c, _ := dialScript(t, &script{start: running, waits: waits{at(asks), at(ended)}})
		res, err := c.Exec(t.Context(), ExecOptions{})
		if err != nil || res.WaitingForInput || res.StillRunning {
			t.Errorf("Exec = %+v, %v", res, err)
		}
	})
	t.Run("wait limit", func(t *testing.T) {
		s := &script{start: running, waits: waits{later(running)}}
		c, _ := dialScript(t, s)
		res, err := c.Exec(t.Context(), ExecOptions{FollowOptions: FollowOptions{Wait: 20 * time.Millisecond}})
		if err != nil || !res.StillRunning || res.TimedOut || res.Text != "? " {
			t.Errorf("Exec = %+v, %v", res, err)
		}
		if s.started[0].WaitMs > 20 || s.started[0].TimeoutMs != 0 {
			t.Errorf("the shim was asked %v", s.started[0])
		}
	})
	t.Run("background", func(t *testing.T) {
		s := &script{start: &api.StepResponse{Session: "service-1", Step: 1}}
		c, _ := dialScript(t, s)
		res, err := c.Exec(t.Context(), ExecOptions{Background: true})
		if err != nil || !res.StillRunning || res.Session != "service-1" {
			t.Errorf("Exec = %+v, %v", res, err)
		}
		if r := s.started[0]; r.WaitMs != 0 || !r.Background {
			t.Errorf("the shim was asked %v", r)
		}
	})
	t.Run("input was just given", func(t *testing.T) {
		// What the shim says first is from before the input.
		s := &script{waits: waits{at(asks), later(ended)}}
		c, _ := dialScript(t, s)
		res, err := c.Wait(t.Context(), WaitOptions{FollowOptions: FollowOptions{ReturnOnInput: true}, Offset: 2})
		if err != nil || res.StillRunning || !res.ExitKnown {
			t.Errorf("Wait = %+v, %v", res, err)
		}
	})
	t.Run("input is waited for since long", func(t *testing.T) {
		s := &script{waits: waits{at(asks), later(asks)}}
		c, _ := dialScript(t, s)
		res, err := c.Wait(t.Context(), WaitOptions{FollowOptions: FollowOptions{ReturnOnInput: true}, Offset: 2})
		if err != nil || !res.WaitingForInput {
			t.Errorf("Wait = %+v, %v", res, err)
		}
	})
}

// TestWait names a step in several ways, and reads by reference.
func TestWait(t *testing.T) {
	ended := &api.StepResponse{Session: "s", Step: 8, Generation: 3, Ended: true, ExitKnown: true, ExitCode: 1, OutputBytes: 10, Offset: 6, Output: []byte("tail")}
	s := &script{waits: []func(context.Context, *api.WaitStepRequest) (*api.StepResponse, error){at(ended), at(ended), at(ended), at(ended)}}
	c, _ := dialScript(t, s)
	res, err := c.Wait(t.Context(), WaitOptions{Session: "s"})
	if err != nil || res.Step != 8 || res.ExitCode != 1 || res.Text != "tail" || !res.Truncated || res.DroppedBytes != 6 || res.DroppedAt != 0 || res.SkippedBytes != 6 {
		t.Errorf("Wait = %+v, %v", res, err)
	}
	generation := uint64(3)
	res, err = c.Wait(t.Context(), WaitOptions{Session: "s", Step: 8, Generation: &generation, Offset: 6})
	if err != nil || res.Text != "tail" || res.Truncated || res.OutputOffset != 6 || res.NextOffset != 10 {
		t.Errorf("Wait = %+v, %v", res, err)
	}
	p, err := c.Output(t.Context(), "s", 8, &generation, 2)
	if err != nil || string(p.Data) != "tail" || p.Offset != 6 || p.Next != 10 || !p.End {
		t.Errorf("Output = %+v, %v", p, err)
	}
	ended.Output, ended.Offset = nil, 0
	if p, err = c.Output(t.Context(), "s", 8, nil, 10); err != nil || len(p.Data) != 0 || p.Next != 10 || !p.End {
		t.Errorf("Output at the end = %+v, %v", p, err)
	}
	for i, want := range []*api.WaitStepRequest{
		{AnyGeneration: true}, {Step: 8, Generation: 3, Offset: 6}, {Step: 8, Generation: 3, Offset: 2}, {Step: 8, AnyGeneration: true, Offset: 10},
	} {
		got := s.waited[i]
		if got.Session != "s" || got.Step != want.Step || got.Generation != want.Generation || got.AnyGeneration != want.AnyGeneration || got.Offset != want.Offset || got.WaitMs != 0 {
			t.Errorf("call %d asked %v, want %v", i, got, want)
		}
	}
}

func TestSend(t *testing.T) {
	s := &script{}
	c, _ := dialScript(t, s)
	line := strings.Repeat("x", 1000) + "\n"
	text := strings.Repeat(line, 3000) + strings.Repeat("y", sendPiece+5)
	if err := c.Send(t.Context(), "main", []byte(text)); err != nil {
		t.Fatal(err)
	}
	if got := bytes.Join(s.sent, nil); string(got) != text {
		t.Errorf("%d bytes were sent, want %d", len(got), len(text))
	}
	for i, p := range s.sent {
		// Lines stay whole as long as there are some.
		if len(p) > sendPiece || i < 2 && p[len(p)-1] != '\n' {
			t.Errorf("piece %d has %d bytes and ends with %q", i, len(p), p[len(p)-1])
		}
	}
	if err := c.Interrupt(t.Context(), "main"); err != nil || !slices.Equal(s.signals, []uint32{2}) {
		t.Errorf("Interrupt = %v; signals %v", err, s.signals)
	}
	if err := c.Signal(t.Context(), "main", 0); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Signal 0 = %v", err)
	}
}

func TestKept(t *testing.T) {
	type piece struct {
		offset uint64
		text   string
	}
	for _, tt := range []struct {
		name         string
		limit, begin uint64
		pieces       []piece
		out, text    string
		at           int
		dropped      uint64
		skipped      uint64
	}{
		{name: "all", limit: 10, pieces: []piece{{0, "abc"}, {3, "defghij"}}, out: "abcdefghij", text: "abcdefghij", at: 5},
		{name: "odd limit", limit: 11, pieces: []piece{{0, "0123456789a"}}, out: "012346789a", text: "012346789a", at: 5, dropped: 1},
		{name: "long", limit: 4, pieces: []piece{{0, "a"}, {1, "bcdefgh"}, {8, "ij"}, {10, ""}, {10, "k"}}, out: "abjk", text: "abjk", at: 2, dropped: 7},
		{name: "gap", limit: 100, pieces: []piece{{0, "ab"}, {7, "cd"}}, out: "abcd", text: "abcd", at: 2, dropped: 5, skipped: 5},
		{name: "two gaps", limit: 100, pieces: []piece{{0, "ab"}, {7, "cd"}, {10, "ef"}}, out: "abef", text: "abef", at: 2, dropped: 8, skipped: 6},
		{name: "from an offset", limit: 100, begin: 50, pieces: []piece{{50, "ab"}}, out: "ab", text: "ab", at: 2},
		{name: "character in a gap", limit: 4, pieces: []piece{{0, "a\xc3xxx\xa9b"}}, out: "a\xc3\xa9b", text: "a\ufffd\ufffdb", at: 2, dropped: 3},
		{name: "character in two pieces", limit: 100, pieces: []piece{{0, "a\xc3"}, {2, "\xa9"}}, out: "aé", text: "aé", at: 3},
		{name: "no characters", limit: 100, pieces: []piece{{0, "\xff\xfe\x00\xc3"}}, out: "\xff\xfe\x00\xc3", text: "\ufffd\ufffd\x00\ufffd", at: 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKept(tt.limit, tt.begin)
			for _, p := range tt.pieces {
				k.add(p.offset, []byte(p.text))
			}
			if got := string(k.bytes()); got != tt.out || k.text() != tt.text || k.dropped() != tt.dropped || k.skipped != tt.skipped || len(k.head) != tt.at {
				t.Errorf("kept %q, %q, %d dropped at %d, %d skipped", got, k.text(), k.dropped(), len(k.head), k.skipped)
			}
		})
	}
}
