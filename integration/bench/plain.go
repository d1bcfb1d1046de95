package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"

	"github.com/statefork/statefork/integration/testbed"
)

// What is timed of a container that is never checkpointed, as containerd's
// client sees it: the calls of "ctr run -d", "ctr task exec" and "ctr rm -f".
const (
	opCreate = "create"
	opStart  = "start"
	// opExec runs "true" from the call that prepares it to its removal.
	opExec = "exec"
	// opKill ends with the exit.
	opKill   = "kill"
	opDelete = "delete"
	// opLife is all of these.
	opLife = "life"
)

// What the results call the two runtimes in an ordinary life.
const (
	plainOurs = "shim-statefork-v1"
	plainRunc = "shim-runc-v2"
)

const plainRounds = 40

// plain is one runtime's shim, on containerd's own snapshotter.
type plain struct {
	ns      *testbed.Namespace
	variant string
	runtime string
}

// measurePlain adds how long containers take that are never checkpointed, and
// what memory a shim takes for one.
func measurePlain(ctx context.Context, ns *testbed.Namespace, res *results) error {
	say("%d ordinary containers with each of two runtimes", warmUps+plainRounds)
	both := []*plain{{ns, plainOurs, testbed.Runtime}, {ns, plainRunc, "io.containerd.runc.v2"}}
	for n := range warmUps + plainRounds {
		for _, p := range both {
			samples, resident, err := p.life(ctx, fmt.Sprintf("%s-%d", p.variant, n))
			if err != nil {
				return fmt.Errorf("ordinary container of %s: %w", p.variant, err)
			}
			if n < warmUps {
				continue
			}
			for _, s := range samples {
				res.add(p.variant, s)
			}
			res.addMemory(p.variant, resident)
		}
	}
	return nil
}

// life takes a container through everything, and reads the shim's memory while
// the container runs.
func (p *plain) life(ctx context.Context, id string) (samples []sample, resident int64, retErr error) {
	c, err := p.ns.Create(ctx, id, p.runtime, testbed.Stock, oci.WithProcessArgs("sleep", "infinity"))
	if err != nil {
		return nil, 0, err
	}
	ctx = namespaces.WithNamespace(ctx, p.ns.NS)
	defer func() { retErr = errors.Join(retErr, testbed.Destroy(context.WithoutCancel(ctx), c)) }()
	var task containerd.Task
	var exited <-chan containerd.ExitStatus
	var total time.Duration
	for _, step := range []struct {
		operation string
		do        func() error
	}{
		{opCreate, func() (err error) { task, err = c.NewTask(ctx, cio.NullIO); return err }},
		{opStart, func() error { return task.Start(ctx) }},
		{opExec, func() error { return execTrue(ctx, task) }},
		{"", func() (err error) { resident, err = p.shimMemory(id); return err }},
		{"", func() (err error) { exited, err = task.Wait(ctx); return err }},
		{opKill, func() error {
			if err := task.Kill(ctx, syscall.SIGKILL); err != nil {
				return err
			}
			_, _, err := (<-exited).Result()
			return err
		}},
		{opDelete, func() error { _, err := task.Delete(ctx); return err }},
	} {
		s, err := timed(step.operation, step.do)
		if err != nil {
			return nil, 0, err
		}
		if step.operation != "" {
			samples, total = append(samples, s), total+s.took
		}
	}
	return append(samples, sample{opLife, total}), resident, nil
}

func execTrue(ctx context.Context, task containerd.Task) error {
	spec, err := task.Spec(ctx)
	if err != nil {
		return err
	}
	spec.Process.Args = []string{"true"}
	process, err := task.Exec(ctx, "true", spec.Process, cio.NullIO)
	if err != nil {
		return err
	}
	exited, err := process.Wait(ctx)
	if err != nil {
		return err
	}
	if err := process.Start(ctx); err != nil {
		return err
	}
	status := <-exited
	if code, _, err := status.Result(); err != nil || code != 0 {
		return errors.Join(err, fmt.Errorf("exec ended with %d", code))
	}
	_, err = process.Delete(ctx)
	return err
}

// shimMemory is the resident memory of a container's shim, in KiB.
func (p *plain) shimMemory(id string) (int64, error) {
	pid, err := p.ns.ShimOf(id)
	if err != nil {
		return 0, err
	}
	f, err := os.Open(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) == 3 && fields[0] == "VmRSS:" {
			return strconv.ParseInt(fields[1], 10, 64)
		}
	}
	return 0, fmt.Errorf("read memory of shim %d: no VmRSS", pid)
}

// plainMarkdown tells of containers that are never checkpointed.
func (r *results) plainMarkdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "\nAn ordinary container, without any checkpoint, on containerd's `overlayfs` snapshotter: median (minimum) in milliseconds of %d rounds, and the resident memory of its shim:\n\n", plainRounds)
	fmt.Fprintf(&b, "| | %s | %s | ratio |\n|---|--:|--:|--:|\n", plainOurs, plainRunc)
	for _, operation := range []string{opCreate, opStart, opExec, opKill, opDelete, opLife} {
		x, y := r.find(plainOurs, operation), r.find(plainRunc, operation)
		fmt.Fprintf(&b, "| %s | %.1f (%.1f) | %.1f (%.1f) | %.2f |\n", operation, x.Median, x.Min, y.Median, y.Min, x.Median/y.Median)
	}
	x, y := r.memory(plainOurs), r.memory(plainRunc)
	fmt.Fprintf(&b, "| memory of the shim, MiB | %.1f | %.1f | %.2f |\n", x.MedianMiB, y.MedianMiB, x.MedianMiB/y.MedianMiB)
	return b.String()
}
