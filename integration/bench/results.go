package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// results are the samples of one run.
type results struct {
	Machine string `json:"machine"`
	Rounds  int    `json:"rounds"`
	Rows    []*row `json:"rows"`
}

// row is one operation of one variant.
type row struct {
	Variant   string    `json:"variant"`
	Operation string    `json:"operation"`
	Median    float64   `json:"median_ms"`
	Min       float64   `json:"min_ms"`
	Samples   []float64 `json:"samples_ms"`
}

func (r *results) add(variant string, s sample) {
	i := slices.IndexFunc(r.Rows, func(x *row) bool { return x.Variant == variant && x.Operation == s.operation })
	if i < 0 {
		i = len(r.Rows)
		r.Rows = append(r.Rows, &row{Variant: variant, Operation: s.operation})
	}
	x := r.Rows[i]
	x.Samples = append(x.Samples, float64(s.took.Microseconds())/float64(time.Millisecond/time.Microsecond))
	sorted := slices.Sorted(slices.Values(x.Samples))
	mid := len(sorted) / 2
	x.Min, x.Median = sorted[0], sorted[mid]
	if len(sorted)%2 == 0 {
		x.Median = (sorted[mid-1] + sorted[mid]) / 2
	}
}

func (r *results) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d rounds, all variants in turn; %s.\n\n", r.Rounds, r.Machine)
	b.WriteString("| variant | operation | median ms | minimum ms |\n|---|---|--:|--:|\n")
	last := ""
	for _, x := range r.rowsByVariant() {
		name := x.Variant
		if name == last {
			name = ""
		}
		last = x.Variant
		fmt.Fprintf(&b, "| %s | %s | %.1f | %.1f |\n", name, x.Operation, x.Median, x.Min)
	}
	return b.String()
}

// rowsByVariant keeps the order in which variants and operations came first.
func (r *results) rowsByVariant() []*row {
	var order []string
	for _, x := range r.Rows {
		if !slices.Contains(order, x.Variant) {
			order = append(order, x.Variant)
		}
	}
	rows := slices.Clone(r.Rows)
	slices.SortStableFunc(rows, func(a, b *row) int {
		return slices.Index(order, a.Variant) - slices.Index(order, b.Variant)
	})
	return rows
}

func (r *results) json() []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		panic(err) // plain data
	}
	return b.Bytes()
}

// figures are the medians of our variant on our snapshotter, and how long runc
// needs to come to the same point.
func (r *results) figures() string {
	var parts []string
	var alone float64
	for _, x := range r.Rows {
		switch x.Variant {
		case r.Rows[0].Variant:
			parts = append(parts, fmt.Sprintf("%s %.0f ms", x.Operation, x.Median))
		case (&runc{}).name():
			alone += x.Median
		}
	}
	return fmt.Sprintf("%s; runc's checkpoint and restore %.0f ms", strings.Join(parts, "; "), alone)
}

var versionRE = regexp.MustCompile(`\d+\.\d+(\.\d+)?`)

func versionIn(s string) string { return versionRE.FindString(s) }

func cpus() string { return fmt.Sprintf("%d cores (%s)", runtime.NumCPU(), runtime.GOARCH) }

// fileSystem names the type of the file system at path.
func fileSystem(path string) string {
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return err.Error()
	}
	names := map[int64]string{0xef53: "ext4", 0x9123683e: "btrfs", 0x58465342: "xfs", 0x01021994: "tmpfs", 0x794c7630: "overlay"}
	if name, ok := names[int64(st.Type)]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", st.Type)
}
