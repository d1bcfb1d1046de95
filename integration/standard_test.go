package integration_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/statefork/statefork/integration/testbed"
)

// TestRestoreOntoBareImage restores by containerd's own calls into a container
// that is fresh from its image: the image has not all directories and files that
// the dumped one had something mounted on.
func TestRestoreOntoBareImage(t *testing.T) {
	e := setup(t, common(t))
	note := filepath.Join(t.TempDir(), "note")
	if err := os.WriteFile(note, []byte("from outside"), 0o644); err != nil {
		t.Fatal(err)
	}
	create := func(id string) containerd.Container {
		c, err := e.ns.Create(e.ctx, id, testbed.Runtime, e.snapshotter,
			oci.WithProcessArgs("sh", "-c", "echo inside >/made/up/tmp/f; while :; do sleep 1000; done"),
			oci.WithMounts([]specs.Mount{
				{Destination: "/made/up/tmp", Type: "tmpfs", Source: "tmpfs"},
				{Destination: "/also/made/note", Type: "bind", Source: note, Options: []string{"bind", "ro"}},
			}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := testbed.Destroy(e.cleanupContext(), c); err != nil {
				t.Error(err)
			}
		})
		return c
	}
	task, err := create("source").NewTask(e.ctx, cio.NullIO)
	if err != nil {
		t.Fatal(err)
	}
	if err := task.Start(e.ctx); err != nil {
		t.Fatal(err)
	}
	const look = "cat /made/up/tmp/f /also/made/note"
	e.eventually(func() error {
		_, err := e.ns.ExecIn(e.ctx, "source", "test", "-s", "/made/up/tmp/f")
		return err
	})
	images := filepath.Join(t.TempDir(), "images")
	if _, err := task.Checkpoint(e.ctx, containerd.WithCheckpointImagePath(images)); err != nil {
		t.Fatal(err)
	}
	restored, err := create("bare").NewTask(e.ctx, cio.NullIO, containerd.WithRestoreImagePath(images))
	if err != nil {
		t.Fatal(err)
	}
	if err := restored.Start(e.ctx); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"source", "bare"} {
		if got := e.sh(id, look); strings.TrimSpace(got) != "inside\nfrom outside" {
			t.Errorf("%s has %q", id, got)
		}
	}
}
