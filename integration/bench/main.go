// Command bench measures how long checkpoints, restores and forks take, beside
// what containerd, runc and CRIU need for the like in the same run. It writes
// docs/benchmarks.md and the samples as JSON beside it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/statefork/statefork/integration/testbed"
)

func main() {
	rounds := flag.Int("rounds", 10, "how often each thing is measured")
	out := flag.String("o", "docs/benchmarks.md", "`file` whose table to replace; the samples go beside it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	figures, err := run(ctx, *rounds, *out)
	stop()
	verdict := "ok"
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		verdict, figures = "short", "see above"
	}
	if name := os.Getenv("FIGURES"); name != "" {
		err = errors.Join(err, os.WriteFile(name, []byte(figures+"\n"), 0o600))
	} else {
		fmt.Printf("bench: %s (%s)\n", verdict, figures)
	}
	if err != nil {
		os.Exit(1)
	}
}

// variant is one way to bring a process back.
type variant interface {
	// name is the same in each run.
	name() string
	// start starts the process that is measured.
	start(ctx context.Context) error
	// round does everything once and says how long each operation took.
	round(ctx context.Context, n int) ([]sample, error)
	// stop leaves nothing.
	stop(ctx context.Context) error
}

type sample struct {
	operation string
	took      time.Duration
}

func run(ctx context.Context, rounds int, out string) (figures string, retErr error) {
	tb, err := testbed.Start(ctx, func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) })
	if err != nil {
		return "", err
	}
	clean := context.WithoutCancel(ctx)
	defer func() { retErr = errors.Join(retErr, tb.Stop(clean)) }()
	ns := tb.Namespace(tb.Name + "-bench")
	if err := ns.ImportBusybox(ctx); err != nil {
		return "", err
	}
	variants := []variant{
		&ours{ns: ns, snapshotter: testbed.Snapshotter},
		&ours{ns: ns, snapshotter: testbed.Stock},
		&stock{ns: ns},
		&runc{ns: ns},
		&bare{ns: ns},
	}
	res, err := measure(ctx, variants, rounds)
	err = errors.Join(err, ns.Check(clean), ns.Empty(clean))
	if err != nil {
		return "", err
	}
	if res.Machine, err = describeMachine(ctx, tb); err != nil {
		return "", err
	}
	if err := res.write(out); err != nil {
		return "", err
	}
	fmt.Println(res.table())
	return res.figures(), nil
}

// measure does the rounds. All variants take turns, so that whatever else the
// machine does meets all of them.
func measure(ctx context.Context, variants []variant, rounds int) (res *results, retErr error) {
	res = &results{Rounds: rounds}
	for _, v := range variants {
		defer func() {
			if err := v.stop(context.WithoutCancel(ctx)); err != nil {
				retErr = errors.Join(retErr, fmt.Errorf("stop %s: %w", v.name(), err))
			}
		}()
		if err := v.start(ctx); err != nil {
			return nil, fmt.Errorf("start %s: %w", v.name(), err)
		}
	}
	for n := range rounds + 1 {
		for _, v := range variants {
			samples, err := v.round(ctx, n)
			if err != nil {
				return nil, fmt.Errorf("round %d of %s: %w", n, v.name(), err)
			}
			if n == 0 {
				continue // fills caches
			}
			for _, s := range samples {
				res.add(v.name(), s)
			}
		}
	}
	return res, nil
}

// timed says how long f takes.
func timed(operation string, f func() error) (sample, error) {
	start := time.Now()
	err := f()
	s := sample{operation, time.Since(start)}
	if err != nil {
		err = fmt.Errorf("%s: %w", operation, err)
	}
	return s, err
}

// describeMachine is the line without which numbers say nothing.
func describeMachine(ctx context.Context, tb *testbed.Testbed) (string, error) {
	var uts syscall.Utsname
	if err := syscall.Uname(&uts); err != nil {
		return "", fmt.Errorf("describe machine: %w", err)
	}
	var release strings.Builder
	for _, c := range uts.Release {
		if c == 0 {
			break
		}
		release.WriteByte(byte(c))
	}
	parts := []string{"kernel " + release.String(), cpus()}
	for _, tool := range []string{"criu", "containerd", "runc"} {
		out, err := tb.Exec(ctx, tool, "--version")
		if err != nil {
			return "", err
		}
		parts = append(parts, tool+" "+versionIn(out.Stdout))
	}
	cgroups := "cgroup v2"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		cgroups = "cgroup v1"
	}
	return strings.Join(append(parts, cgroups, "images on "+fileSystem(tb.Dir)), ", "), nil
}

// write puts the table between the marks in the file, and the samples beside.
func (r *results) write(path string) error {
	const begin, end = "<!-- begin table -->\n", "<!-- end table -->\n"
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("write results: %q has no place for the table", path)
	}
	text := before + begin + r.table() + end + after
	samples := strings.TrimSuffix(path, filepath.Ext(path)) + ".json"
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o644), os.WriteFile(samples, r.json(), 0o644)); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}
