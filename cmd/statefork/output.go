package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/doctor"
	"github.com/statefork/statefork/statefork/waypoint"
)

// output prints results to out, as text or as JSON, and remarks to msg.
type output struct {
	out, msg io.Writer
	json     bool
	now      time.Time
}

func printer(cmd *cli.Command) *output {
	root := cmd.Root()
	return &output{out: root.Writer, msg: root.ErrWriter, json: cmd.Bool("json"), now: time.Now()}
}

func (o *output) asJSON(v any) error {
	e := json.NewEncoder(o.out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func (o *output) remark(format string, args ...any) {
	fmt.Fprintf(o.msg, "statefork: "+format+"\n", args...)
}

// external tells what an operation did not cover; nothing is left out silently.
func (o *output) external(list []statefork.External, what string) {
	for _, e := range list {
		if e.Detail != "" {
			o.remark("%s: %s %s (%s)", what, e.Kind, e.Name, e.Detail)
		} else {
			o.remark("%s: %s %s", what, e.Kind, e.Name)
		}
	}
}

// result prints the node's id, which is all that a script wants. external says
// what it means that something lies outside of the node.
func (o *output) result(r *waypoint.Result, external string) error {
	if o.json {
		return o.asJSON(r)
	}
	for _, e := range r.EndedExecs {
		o.remark("exec %s (pid %d) was ended", e.ID, e.PID)
	}
	o.external(r.External, external)
	o.remark("%s", timings(r.Timings))
	_, err := fmt.Fprintln(o.out, r.Node.ID)
	return err
}

func timings(t waypoint.Timings) string {
	var parts []string
	for _, p := range []struct {
		name string
		d    time.Duration
	}{{"total", t.Total}, {"frozen", t.Frozen}, {"dump", t.Dump}, {"snapshot", t.Snapshot}, {"restore", t.Restore}} {
		if p.d > 0 {
			parts = append(parts, p.name+" "+p.d.Round(100*time.Microsecond).String())
		}
	}
	return strings.Join(parts, ", ")
}

// fork prints a line for each sibling that runs: its id, and its name if it has
// one.
func (o *output) fork(r *waypoint.ForkResult) error {
	if o.json {
		return o.asJSON(r)
	}
	o.external(r.External, "shared with the source")
	o.external(r.Dropped, "not kept")
	for _, s := range r.Siblings {
		if s.Err != nil {
			o.remark("%s", message(s.Err, ""))
			continue
		}
		if _, err := fmt.Fprintln(o.out, strings.TrimSpace(s.ID+" "+s.Name)); err != nil {
			return err
		}
	}
	return nil
}

func (o *output) removed(nodes []statefork.Node) error {
	if o.json {
		return o.asJSON(nodes)
	}
	for _, n := range nodes {
		if _, err := fmt.Fprintln(o.out, n.ID); err != nil {
			return err
		}
	}
	return nil
}

func (o *output) containers(list []waypoint.Container) error {
	if o.json {
		if list == nil {
			list = []waypoint.Container{}
		}
		return o.asJSON(list)
	}
	w := tabwriter.NewWriter(o.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "CONTAINER\tNAME\tSTATUS\tNODES\tHEAD\tAGE\tFORKED FROM")
	for _, c := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", shortID(c.ID), dash(c.Name), c.Status, c.Nodes,
			dash(c.Head), age(o.now.Sub(c.Created)), dash(shortOrigin(c.ForkedFrom)))
	}
	return w.Flush()
}

// shortID cuts nerdctl's long ids as nerdctl does; it is still a unique prefix.
func shortID(id string) string {
	if len(id) == 64 {
		return id[:12]
	}
	return id
}

func shortOrigin(origin string) string {
	if origin == "" {
		return ""
	}
	container, node := waypoint.SplitRef(origin)
	return shortID(container) + "@" + node
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func (o *output) findings(list []doctor.Finding) error {
	if o.json {
		return o.asJSON(list)
	}
	w := tabwriter.NewWriter(o.out, 0, 0, 2, ' ', 0)
	for _, f := range list {
		text := f.Detail
		if f.Fix != "" {
			text += ": " + f.Fix
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Level, f.Check, text)
	}
	return w.Flush()
}

// age is a duration in its largest unit.
func age(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 2*day:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/day)
}

// size is a number of bytes in its largest unit.
func size(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/unit, 0
	for ; f >= unit && i < 4; i++ {
		f /= unit
	}
	return fmt.Sprintf("%.1f %ciB", f, "KMGTP"[i])
}
