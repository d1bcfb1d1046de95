// Package layout_test checks that packages import only what lies below them, and
// that each says what it is. It needs neither root nor a daemon.
package layout_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	_ "github.com/containerd/containerd/v2/pkg/testutil" // registers -test.root, which all of integration is given
)

const module = "github.com/statefork/statefork"

// maxLines is the size from which a file is split by concept.
const maxLines = 700

// pkg is what "go list" tells of a package.
type pkg struct {
	ImportPath   string
	Name         string
	Dir          string
	GoFiles      []string
	CgoFiles     []string
	TestGoFiles  []string
	XTestGoFiles []string
	Imports      []string
	TestImports  []string
	XTestImports []string
}

// path is the package's place within the module.
func (p pkg) path() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

// allImports are those of the package and of its tests.
func (p pkg) allImports() []string { return slices.Concat(p.Imports, p.TestImports, p.XTestImports) }

func (p pkg) files() []string {
	return slices.Concat(p.GoFiles, p.CgoFiles, p.TestGoFiles, p.XTestGoFiles)
}

// list runs "go list" once for all tests.
var list = sync.OnceValues(func() ([]pkg, error) {
	cmd := exec.Command("go", "list", "-tags", "seccomp", "-json", module+"/...")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, errors.Join(err, errors.New(stderr.String()))
	}
	var all []pkg
	for d := json.NewDecoder(&stdout); ; {
		var p pkg
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
})

func packages(t *testing.T) []pkg {
	t.Helper()
	all, err := list()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < len(layers)/2 {
		t.Fatalf("go list found only %d packages", len(all))
	}
	return all
}

// layer says which of our packages a package may import, and why these. A path
// that ends in "/..." is that package with all below it.
type layer struct {
	path string
	may  []string
	why  string
}

// layers is the whole module, from below upwards. What is in no row may not be.
var layers = []layer{
	{"layer", nil, "how a sealed layer lies on disk: all that runtime and snapshotter share"},
	{"snapshotter", []string{"layer"}, "keeps layers and knows no processes"},
	{"runtime/criu", nil, "a transport: it knows no containers"},
	{"runtime/rootfs", nil, "is given mounts and knows no snapshots"},
	{"runtime/launch", nil, "starts a process, of whichever container"},
	{"runtime/terminal/shell", nil, "the language of shells, over whichever pipes"},
	{"runtime/terminal", []string{"runtime/terminal/shell"}, "terminals and shells, of whichever process"},
	{"runtime/container", []string{"layer", "runtime/criu", "runtime/launch", "runtime/rootfs", "runtime/terminal", "runtime/terminal/shell"}, "processes and their root; containerd is the shim's affair"},
	{"shim/api", []string{"layer"}, "what the shim's clients need must not bring in the shim"},
	{"shim/task", []string{"runtime/container", "runtime/rootfs"}, "containerd's protocol over the runtime; knows no branches"},
	{"shim/waypoint", []string{"layer", "shim/api", "runtime/container", "runtime/rootfs", "runtime/terminal"}, "our protocol over the runtime, and the snapshots"},
	{"shim", []string{"shim/...", "runtime/container"}, "registers both services"},
	{"statefork", nil, "types and interfaces without I/O"},
	{"statefork/waypoint", []string{"statefork", "shim/api", "layer"}, "the fast backend: a client of containerd and of the shim"},
	{"statefork/replay", []string{"statefork"}, "a backend"},
	{"statefork/commit", []string{"statefork", "shim/api", "layer"}, "a backend"},
	{"statefork/hybrid", []string{"statefork", "shim/api", "layer"}, "a backend"},
	{"statefork/bolt", []string{"statefork"}, "a store"},
	{"statefork/fake", []string{"statefork"}, "a backend without a machine"},
	{"statefork/explore", []string{"statefork"}, "policies decide; they do not act"},
	{"statefork/backendtest", []string{"statefork"}, "knows the contract and no backend"},
	{"statefork/doctor", []string{"statefork", "statefork/waypoint", "shim/api", "layer"}, "looks at the host through the clients"},
	{"cmd/containerd-shim-statefork-v1", []string{"shim"}, "wires"},
	{"cmd/containerd-statefork-grpc", []string{"snapshotter"}, "wires"},
	{"cmd/statefork", []string{"statefork/...", "shim/api"}, "wires a command line; needs neither runtime nor snapshotter"},
	{"contrib/...", nil, "stands alone"},
	{"integration/testbed", nil, "runs programs; a test that linked in their parts would test something else"},
	{"integration/...", []string{"integration/testbed", "statefork/...", "shim/api", "layer"}, "uses what users have"},
}

// within says whether a path is the pattern's, or below it if that ends in
// "/...".
func within(path, pattern string) bool {
	top, below := strings.CutSuffix(pattern, "/...")
	return path == top || below && strings.HasPrefix(path, top+"/")
}

func rowOf(path string) (layer, bool) {
	for _, l := range layers {
		if within(path, l.path) {
			return l, true
		}
	}
	return layer{}, false
}

func TestLayers(t *testing.T) {
	for _, p := range packages(t) {
		row, ok := rowOf(p.path())
		if !ok {
			t.Errorf("package %q is in no row of the table of layers", p.path())
			continue
		}
		imports := p.Imports
		if strings.HasPrefix(p.path(), "integration") {
			imports = p.allImports() // mostly tests
		}
		for _, imp := range imports {
			below, ours := strings.CutPrefix(imp, module+"/")
			if ours && !slices.ContainsFunc(row.may, func(m string) bool { return within(below, m) }) {
				t.Errorf("%s imports %s; it %s", p.path(), below, row.why)
			}
		}
	}
}

// owners are the only packages that may know something from outside.
var owners = []struct {
	prefix string
	owners []string
	why    string
}{
	{"github.com/checkpoint-restore/go-criu", []string{"runtime/criu"}, "CRIU's protocol changes with its versions"},
	{"github.com/opencontainers/runc/libcontainer", []string{"runtime/container"}, "its internals are no stable interface"},
	{"github.com/urfave/cli", []string{"cmd/statefork"}, "the library has no command line"},
	{"go.etcd.io/bbolt", []string{"snapshotter", "statefork/bolt"}, "each store is one package's own"},
}

func TestOwners(t *testing.T) {
	used := map[string]bool{}
	for _, p := range packages(t) {
		for _, imp := range p.allImports() {
			for _, o := range owners {
				if !strings.HasPrefix(imp, o.prefix) {
					continue
				}
				if slices.Contains(o.owners, p.path()) {
					used[o.prefix] = true
					continue
				}
				t.Errorf("%s imports %s, which is for %v alone: %s", p.path(), imp, o.owners, o.why)
			}
		}
	}
	for _, o := range owners {
		if !used[o.prefix] {
			t.Errorf("nobody imports %s any more: the row is stale", o.prefix)
		}
	}
}

// TestForbidden keeps heavy or platform-wide parts out of what must stay small.
func TestForbidden(t *testing.T) {
	for _, p := range packages(t) {
		if p.path() != "statefork" {
			continue
		}
		for _, imp := range p.Imports {
			first, _, _ := strings.Cut(imp, "/")
			if strings.Contains(first, ".") && imp != "github.com/containerd/errdefs" && imp != "github.com/containerd/log" {
				t.Errorf("statefork imports %s; it needs the standard library, errdefs and log", imp)
			}
		}
		return
	}
	t.Error("there is no package statefork")
}

var badNames = []string{"util", "utils", "common", "helper", "helpers", "types", "misc", "pkg", "v1"}

func TestNames(t *testing.T) {
	for _, p := range packages(t) {
		for _, name := range []string{p.Name, filepath.Base(p.Dir)} {
			if slices.Contains(badNames, name) {
				t.Errorf("package %s: %q names no concept", p.path(), name)
			}
		}
		if p.Name != "main" && p.Name != filepath.Base(p.Dir) {
			t.Errorf("package %s is called %q", p.path(), p.Name)
		}
	}
}

// TestDocs wants one doc per package, that begins as godoc expects.
func TestDocs(t *testing.T) {
	for _, p := range packages(t) {
		files := slices.Concat(p.GoFiles, p.CgoFiles)
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + filepath.Base(p.Dir) + " "
		}
		if len(files) == 0 {
			files = slices.Concat(p.TestGoFiles, p.XTestGoFiles)
			want = "Package " + filepath.Base(p.Dir)
		}
		var docs []string
		for _, name := range files {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, name), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc == nil || ast.IsGenerated(f) {
				continue
			}
			docs = append(docs, name)
			if text := f.Doc.Text(); !strings.HasPrefix(text, want) {
				t.Errorf("%s/%s: the doc begins %q, not %q", p.path(), name, strings.SplitN(text, "\n", 2)[0], want)
			}
		}
		if len(docs) != 1 {
			t.Errorf("package %s has docs in %d files %v, want one", p.path(), len(docs), docs)
		}
	}
}

func TestFileSizes(t *testing.T) {
	for _, p := range packages(t) {
		for _, name := range p.files() {
			path := filepath.Join(p.Dir, name)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, b, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if n := bytes.Count(b, []byte("\n")); n > maxLines && !ast.IsGenerated(f) {
				t.Errorf("%s/%s has %d lines, more than %d", p.path(), name, n, maxLines)
			}
		}
	}
}
