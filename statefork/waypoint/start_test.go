package waypoint

import (
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestIO(t *testing.T) {
	const logger = "binary:///usr/local/bin/nerdctl?_NERDCTL_INTERNAL_LOGGING=%2Fvar%2Flib%2Fnerdctl%2Fb3bb6081"
	web, job := record(t, "nerdctl.json"), record(t, "ctr.json")
	tty := edited(t, web, func(s *specs.Spec) { s.Process.Terminal = true })
	for _, tt := range []struct {
		name string
		rec  containers.Container
		uri  string
		want cio.Config
		ok   bool
	}{
		{name: "nerdctl", rec: web, uri: "", want: cio.Config{Stdout: logger, Stderr: logger}, ok: true},
		{name: "terminal", rec: tty, uri: "", want: cio.Config{Terminal: true, Stdout: logger}, ok: true},
		{name: "ctr", rec: job, uri: "", ok: true},
		{name: "given", rec: web, uri: "file:///x", want: cio.Config{Stdout: "file:///x", Stderr: "file:///x"}, ok: true},
		{name: "none", rec: web, uri: "none", ok: true},
		{name: "no uri", rec: web, uri: "/x/y"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			create, err := ioOf(tt.rec, tt.uri)
			if !tt.ok {
				if !errdefs.IsInvalidArgument(err) {
					t.Errorf("ioOf = %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			io, err := create("id")
			if err != nil || io.Config() != tt.want {
				t.Errorf("io is %+v, %v; want %+v", io.Config(), err, tt.want)
			}
		})
	}
}

func TestRestartLabels(t *testing.T) {
	got := restartLabels(map[string]string{
		"containerd.io/restart.status": "stopped", "containerd.io/restart.explicitly-stopped": "true", "containerd.io/restart.policy": "always",
	})
	if len(got) != 2 || got["containerd.io/restart.status"] != "running" || got["containerd.io/restart.explicitly-stopped"] != "false" {
		t.Errorf("labels are %v", got)
	}
	if got := restartLabels(map[string]string{"app": "x"}); len(got) != 0 {
		t.Errorf("labels out of nothing: %v", got)
	}
}
