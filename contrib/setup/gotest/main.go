// Command gotest runs "go test" with its arguments and counts the tests,
// subtests included. It prints what failed in full, what was skipped with the
// reason, and one line per package; the counts go to the file $FIGURES.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// event is what "go test -json" writes, a line each.
type event struct {
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
}

// run is what is known of one "go test" so far.
type run struct {
	passed, skipped int
	// failed also counts a package that failed without a failing test: one that
	// does not build, or whose process died.
	failed int
	// output is what unfinished tests printed: by package, then by test.
	output map[string]map[string][]string
	// failedTests is the number of failed tests by package.
	failedTests map[string]int
	w           io.Writer
}

func main() {
	cmd := exec.Command("go", append([]string{"test", "-json"}, os.Args[1:]...)...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
		os.Exit(1)
	}
	r := newRun(os.Stdout)
	r.read(stdout)
	err = cmd.Wait()
	figures := r.figures()
	if name := os.Getenv("FIGURES"); name != "" {
		if werr := os.WriteFile(name, []byte(figures+"\n"), 0o600); werr != nil {
			fmt.Fprintln(os.Stderr, "gotest:", werr)
		}
	} else {
		fmt.Println(figures)
	}
	if err != nil || !r.ok() {
		os.Exit(1)
	}
}

func newRun(w io.Writer) *run {
	return &run{output: map[string]map[string][]string{}, failedTests: map[string]int{}, w: w}
}

// ok is false also if there was no test at all: that is a mistake in what was
// asked for.
func (r *run) ok() bool { return r.failed == 0 && r.passed > 0 }

func (r *run) figures() string {
	s := fmt.Sprintf("%d passed", r.passed)
	if r.failed > 0 {
		s += fmt.Sprintf(", %d failed", r.failed)
	}
	return s + fmt.Sprintf(", %d skipped", r.skipped)
}

func (r *run) read(in io.Reader) {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if json.Unmarshal(line, &e) == nil {
			r.event(e)
		} else {
			// Not from a test: "go test" itself says something.
			fmt.Fprintf(r.w, "%s", line)
		}
		if err != nil {
			return
		}
	}
}

func (r *run) event(e event) {
	switch {
	case e.Action == "build-output":
		fmt.Fprint(r.w, e.Output)
	case e.Action == "output":
		r.addOutput(e)
	case e.Test == "":
		r.packageDone(e)
	default:
		r.testDone(e)
	}
}

func (r *run) addOutput(e event) {
	if e.Test == "" {
		// The summary of a package; "?" stands before one without tests.
		if e.Output != "PASS\n" && !strings.HasPrefix(e.Output, "?") {
			fmt.Fprint(r.w, e.Output)
		}
		return
	}
	for _, prefix := range []string{"=== RUN", "=== PAUSE", "=== CONT", "=== NAME"} {
		if strings.HasPrefix(e.Output, prefix) {
			return
		}
	}
	if r.output[e.Package] == nil {
		r.output[e.Package] = map[string][]string{}
	}
	r.output[e.Package][e.Test] = append(r.output[e.Package][e.Test], e.Output)
}

func (r *run) testDone(e event) {
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		r.failedTests[e.Package]++
		r.print(e.Package, e.Test)
	case "skip":
		r.skipped++
		r.print(e.Package, e.Test)
	default:
		return
	}
	delete(r.output[e.Package], e.Test)
}

func (r *run) packageDone(e event) {
	if e.Action != "pass" && e.Action != "fail" && e.Action != "skip" {
		return
	}
	if e.Action == "fail" && r.failedTests[e.Package] == 0 {
		r.failed++
		for test := range r.output[e.Package] {
			r.print(e.Package, test)
		}
	}
	delete(r.output, e.Package)
}

func (r *run) print(pkg, test string) {
	for _, line := range r.output[pkg][test] {
		fmt.Fprint(r.w, line)
	}
}
