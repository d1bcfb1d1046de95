package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

// What is timed. An operation ends when the process has answered, except for
// opDump.
const (
	// opCheckpoint leaves the process running. For runc and criu it is opDump
	// and opRestore, one after the other.
	opCheckpoint = "checkpoint"
	// opDump ends the process.
	opDump    = "dump"
	opRestore = "restore"
	// opFork starts a new container from a checkpoint.
	opFork = "fork"
)

// sample is how long one operation, or a phase of one, took in one round.
type sample struct {
	operation string
	took      time.Duration
}

// results are the samples of one run.
type results struct {
	Date    string  `json:"date"`
	Machine machine `json:"machine"`
	Rounds  int     `json:"rounds"`
	WarmUps int     `json:"warm_ups"`
	Rows    []*row  `json:"rows"`
	Ratios  []ratio `json:"ratios"`
	// Memory is that of shims with one container each.
	Memory []*memory `json:"memory"`
}

// memory is what the shims of one runtime had resident.
type memory struct {
	Variant   string    `json:"variant"`
	MedianMiB float64   `json:"median_mib"`
	Samples   []float64 `json:"samples_mib"`
}

// row is one operation of one variant, in milliseconds.
type row struct {
	Variant   string    `json:"variant"`
	Operation string    `json:"operation"`
	Median    float64   `json:"median_ms"`
	Min       float64   `json:"min_ms"`
	Samples   []float64 `json:"samples_ms"`
}

// ratio says how the medians of one operation relate.
type ratio struct {
	Operation string  `json:"operation"`
	Of        string  `json:"of"`
	To        string  `json:"to"`
	Ratio     float64 `json:"ratio"`
}

func (r *results) find(variant, operation string) *row {
	i := slices.IndexFunc(r.Rows, func(x *row) bool { return x.Variant == variant && x.Operation == operation })
	if i < 0 {
		return nil
	}
	return r.Rows[i]
}

func (r *results) add(variant string, s sample) {
	x := r.find(variant, s.operation)
	if x == nil {
		x = &row{Variant: variant, Operation: s.operation}
		r.Rows = append(r.Rows, x)
	}
	x.Samples = append(x.Samples, float64(s.took.Microseconds())/1000)
	x.Min, x.Median = slices.Min(x.Samples), median(x.Samples)
}

// memory returns what was read of a runtime's shims.
func (r *results) memory(variant string) *memory {
	i := slices.IndexFunc(r.Memory, func(m *memory) bool { return m.Variant == variant })
	if i < 0 {
		r.Memory = append(r.Memory, &memory{Variant: variant})
		i = len(r.Memory) - 1
	}
	return r.Memory[i]
}

func (r *results) addMemory(variant string, kib int64) {
	m := r.memory(variant)
	m.Samples = append(m.Samples, float64(kib)/1024)
	m.MedianMiB = median(m.Samples)
}

func median(samples []float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	mid := len(sorted) / 2
	if len(sorted)%2 == 0 {
		return (sorted[mid-1] + sorted[mid]) / 2
	}
	return sorted[mid]
}

// compare fills in how each of our operations relates to the others' of the
// same kind.
func (r *results) compare() {
	r.Ratios = nil
	for _, operation := range []string{opCheckpoint, opRestore, opFork} {
		ours := r.find(onLayers, operation)
		for _, x := range r.Rows {
			if x.Operation == operation && x != ours {
				r.Ratios = append(r.Ratios, ratio{operation, onLayers, x.Variant, ours.Median / x.Median})
			}
		}
	}
	for _, x := range r.Rows {
		ours := r.find(stepBash, x.Operation)
		if ours != nil && x != ours {
			r.Ratios = append(r.Ratios, ratio{x.Operation, stepBash, x.Variant, ours.Median / x.Median})
		}
	}
}

func (r *results) json() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	err := e.Encode(r)
	return b.Bytes(), err
}

// markdown is all that changes from run to run.
func (r *results) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d rounds after %d for warming up. %s.\n\n", r.Date, r.Rounds, r.WarmUps, r.Machine)
	b.WriteString("Median (minimum) in milliseconds, as the caller sees it:\n\n")
	variants := []string{onLayers, onStock, "containerd", "runc", "runc-nolock", "criu"}
	r.table(&b, variants, []titled{
		{"checkpoint; the process goes on", opCheckpoint},
		{"checkpoint that ends the process", opDump},
		{"restore in place", opRestore},
		{"new container at a checkpoint", opFork},
	})
	b.WriteString("\nWithin statefork, as the shim tells it:\n\n")
	var lines []titled
	for _, operation := range []string{opCheckpoint, opRestore} {
		for _, phase := range []string{"shim", "frozen", "dump", "snapshot", "restore"} {
			name := operation + "." + phase
			if r.find(onLayers, name) != nil {
				lines = append(lines, titled{operation + ": " + phaseNames[phase], name})
			}
		}
	}
	r.table(&b, []string{onLayers, onStock}, lines)
	b.WriteString("\nMedians of statefork, divided by those of the others (below 1: statefork is faster):\n\n| operation | to | ratio |\n|---|---|--:|\n")
	for _, x := range r.Ratios {
		if x.Of == onLayers {
			fmt.Fprintf(&b, "| %s | %s | %.2f |\n", x.Operation, x.To, x.Ratio)
		}
	}
	b.WriteString(r.commandsMarkdown())
	b.WriteString(r.plainMarkdown())
	return b.String()
}

var phaseNames = map[string]string{
	"shim":     "total",
	"frozen":   "the container does not run",
	"dump":     "CRIU's dump",
	"snapshot": "seal and change the root",
	"restore":  "CRIU's restore",
}

type titled struct{ title, operation string }

// table writes one line for each operation and one column for each variant.
func (r *results) table(b *strings.Builder, variants []string, lines []titled) {
	fmt.Fprintf(b, "| | %s |\n|---|%s\n", strings.Join(variants, " | "), strings.Repeat("--:|", len(variants)))
	for _, l := range lines {
		fmt.Fprintf(b, "| %s |", l.title)
		for _, v := range variants {
			if x := r.find(v, l.operation); x != nil {
				fmt.Fprintf(b, " %.1f (%.1f) |", x.Median, x.Min)
			} else {
				b.WriteString(" |")
			}
		}
		b.WriteString("\n")
	}
}

// figures are for the closing line.
func (r *results) figures() string {
	var parts []string
	for _, operation := range []string{opCheckpoint, opRestore, opFork} {
		parts = append(parts, fmt.Sprintf("%s %.0f ms", operation, r.find(onLayers, operation).Median))
	}
	for _, x := range r.Ratios {
		if x.To == "runc" && x.Operation == opCheckpoint {
			parts = append(parts, fmt.Sprintf("ratio to runc's checkpoint and restore %.2f", x.Ratio))
		}
	}
	return strings.Join(parts[:3], ", ") + "; " + parts[3] +
		fmt.Sprintf("; step %.2f ms", r.find(stepBash, opTrue).Median) +
		fmt.Sprintf("; ordinary container %.2f of runc's time", r.find(plainOurs, opLife).Median/r.find(plainRunc, opLife).Median) +
		fmt.Sprintf(" and %.2f of its shim's memory", r.memory(plainOurs).MedianMiB/r.memory(plainRunc).MedianMiB)
}
