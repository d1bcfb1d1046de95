package shim

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/runc"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	runcexit "github.com/containerd/go-runc"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"google.golang.org/protobuf/proto"
)

func TestInfo(t *testing.T) {
	want, err := typeurl.MarshalAnyToProto(&options.Options{SystemdCgroup: true})
	if err != nil {
		t.Fatal(err)
	}
	in, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	m := newManager("io.statefork.v1")
	info, err := m.Info(context.Background(), bytes.NewReader(in))
	if err != nil {
		t.Fatal(err)
	}
	if info.Name != "io.statefork.v1" || !proto.Equal(info.Options, want) {
		t.Errorf("got %v", info)
	}
	v, err := typeurl.UnmarshalAny(info.Features)
	if err != nil {
		t.Fatal(err)
	}
	f, ok := v.(*features.Features)
	if !ok || len(f.Hooks) == 0 || f.Linux == nil || len(f.Linux.Namespaces) == 0 {
		t.Errorf("features are %+v", v)
	}
	if info, err = m.Info(context.Background(), bytes.NewReader(nil)); err != nil || info.Options != nil {
		t.Errorf("without options: got %v, %v", info, err)
	}
}

// TestStopWithoutContainer is asked to clean up after a shim that never came to
// create its container, and after one that had seen it end.
func TestStopWithoutContainer(t *testing.T) {
	bundle := filepath.Join(t.TempDir(), "c")
	if err := os.Mkdir(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(bundle)
	ctx := namespaces.WithNamespace(context.Background(), "test")
	m := newManager("io.statefork.v1")
	st, err := m.Stop(ctx, "c")
	if err != nil || st.ExitStatus != 137 || st.ExitedAt.IsZero() {
		t.Errorf("got %+v, %v; want the status of a kill", st, err)
	}
	at := time.Now().Add(-time.Minute)
	if err := runc.WriteExitStatus(bundle, runcexit.Exit{Pid: 5, Status: 3, Timestamp: at}); err != nil {
		t.Fatal(err)
	}
	st, err = m.Stop(ctx, "c")
	if err != nil || st.ExitStatus != 3 || st.Pid != 5 || !st.ExitedAt.Equal(at) {
		t.Errorf("got %+v, %v; want what the shim wrote down", st, err)
	}
}

// TestStopRemovesDeadSocket leaves the socket of a shim that lives, and removes
// that of one that was killed.
func TestStopRemovesDeadSocket(t *testing.T) {
	bundle := filepath.Join(t.TempDir(), "c")
	if err := os.Mkdir(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Chdir(bundle)
	ctx := namespaces.WithNamespace(context.Background(), "test")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(bundle, "socket"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	b := fmt.Sprintf(`{"version":3,"address":"unix://%s/socket","protocol":"ttrpc"}`, bundle)
	if err := os.WriteFile("bootstrap.json", []byte(b), 0o600); err != nil {
		t.Fatal(err)
	}
	m := newManager("io.statefork.v1")
	for _, alive := range []bool{true, false} {
		if !alive {
			l.Close()
		}
		if _, err := m.Stop(ctx, "c"); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat("socket"); (err == nil) != alive {
			t.Errorf("shim alive %v: socket: %v", alive, err)
		}
	}
}

func TestServeArguments(t *testing.T) {
	for line, want := range map[string]bool{
		"-namespace n -id c -address /a":                          true,
		"-namespace n -id c -address /a -debug":                   true,
		"-namespace n -id c -address /a -publish-binary /b start": false,
		"-namespace n -id c -address /a -bundle /b delete":        false,
		"-namespace n -id c -address /a start":                    false,
		"-v":                                                      false,
		"-info":                                                   false,
		"":                                                        false,
	} {
		if a, ok := serveArguments(strings.Fields(line)); ok != want || ok && (a.id != "c" || a.namespace != "n" || a.address != "/a") {
			t.Errorf("%q: got %+v, %v", line, a, ok)
		}
	}
}
