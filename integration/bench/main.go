// Command bench measures how long checkpoints, restores and forks of a small
// process take, beside what containerd, runc and CRIU need for the like in the
// same run. In each round every process proves that it is the one that was dumped.
// It writes docs/benchmarks.md and the samples as JSON beside it.
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
	out := flag.String("o", "docs/benchmarks.md", "`file` whose results to replace; the samples go beside it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	if *rounds < 1 {
		fmt.Fprintln(os.Stderr, "bench: -rounds must be 1 or more")
		os.Exit(2)
	}
	figures, err := run(ctx, *rounds, *out)
	verdict := "ok"
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		verdict = "short"
		figures, _, _ = strings.Cut(err.Error(), "\n")
	}
	if ctx.Err() != nil {
		figures = "interrupted"
	}
	stop()
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
	// name is what it is called in the results.
	name() string
	// start starts the process that is measured.
	start(ctx context.Context) error
	// round does everything once and says how long each operation took.
	round(ctx context.Context, n int) ([]sample, error)
	// stop leaves nothing.
	stop(ctx context.Context) error
}

// warmUps are rounds that fill caches and are not counted.
const warmUps = 2

// What the results call statefork on its own snapshotter and on containerd's.
const (
	onLayers = "statefork"
	onStock  = "statefork-overlayfs"
)

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }

func run(ctx context.Context, rounds int, out string) (figures string, retErr error) {
	tb, err := testbed.Start(ctx, say)
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
		&ours{ns: ns, variant: onLayers, snapshotter: testbed.Snapshotter},
		&ours{ns: ns, variant: onStock, snapshotter: testbed.Stock},
		&stock{ns: ns},
		&runc{ns: ns, variant: "runc"},
		&runc{ns: ns, variant: "runc-nolock", criu: "network-lock skip"},
		&bare{ns: ns},
	}
	described, err := describeMachine(ctx, tb)
	if err != nil {
		return "", err
	}
	res, err := measure(ctx, variants, rounds)
	if err == nil {
		err = measureCommands(ctx, ns, res)
	}
	if err == nil {
		err = measurePlain(ctx, ns, res)
	}
	err = errors.Join(err, ns.Check(clean), ns.Empty(clean))
	if err != nil {
		return "", err
	}
	res.compare()
	res.Machine = described
	res.Date = time.Now().UTC().Format(time.DateOnly)
	if err := res.write(out); err != nil {
		return "", err
	}
	fmt.Println(res.markdown())
	return res.figures(), nil
}

// measure does the rounds. All variants take turns, so that whatever else the
// machine does meets all of them.
func measure(ctx context.Context, variants []variant, rounds int) (res *results, retErr error) {
	res = &results{Rounds: rounds, WarmUps: warmUps}
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
	for n := range warmUps + rounds {
		say("round %d of %d", n+1, warmUps+rounds)
		for _, v := range variants {
			samples, err := v.round(ctx, n)
			if err != nil {
				return nil, fmt.Errorf("round %d of %s: %w", n+1, v.name(), err)
			}
			if n < warmUps {
				continue
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

// write puts the results between the marks in the file, and the samples beside.
func (r *results) write(path string) error {
	const begin, end = "<!-- begin -->\n", "<!-- end -->\n"
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("write results: %q has no place for them", path)
	}
	text := before + begin + r.markdown() + end + after
	samples, err := r.json()
	if err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	beside := strings.TrimSuffix(path, filepath.Ext(path)) + ".json"
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o644), os.WriteFile(beside, samples, 0o644)); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}
