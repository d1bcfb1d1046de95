package main

import (
	"strings"
	"testing"
)

func TestCounts(t *testing.T) {
	for _, c := range []struct {
		name, events, figures, printed string
		ok                             bool
	}{
		{
			name: "passes, subtests and skips are counted, and only the skip is printed",
			events: `{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"T"}
{"Action":"output","Package":"p","Test":"T","Output":"=== RUN   T\n"}
{"Action":"output","Package":"p","Test":"T","Output":"chatter\n"}
{"Action":"pass","Package":"p","Test":"T/sub"}
{"Action":"pass","Package":"p","Test":"T"}
{"Action":"output","Package":"p","Test":"S","Output":"needs root\n"}
{"Action":"skip","Package":"p","Test":"S"}
{"Action":"output","Package":"p","Output":"PASS\n"}
{"Action":"output","Package":"p","Output":"ok p\n"}
{"Action":"pass","Package":"p"}
`,
			figures: "2 passed, 1 skipped",
			printed: "needs root\nok p\n",
			ok:      true,
		},
		{
			name: "a failing test is counted once and printed",
			events: `{"Action":"output","Package":"p","Test":"T","Output":"why\n"}
{"Action":"fail","Package":"p","Test":"T"}
{"Action":"pass","Package":"p","Test":"U"}
{"Action":"output","Package":"p","Output":"FAIL\n"}
{"Action":"fail","Package":"p"}
`,
			figures: "1 passed, 1 failed, 0 skipped",
			printed: "why\nFAIL\n",
		},
		{
			name: "a process that died counts, with what its tests had printed",
			events: `{"Action":"output","Package":"p","Test":"T","Output":"last words\n"}
{"Action":"fail","Package":"p"}
`,
			figures: "0 passed, 1 failed, 0 skipped",
			printed: "last words\n",
		},
		{
			name: "a package that does not build counts",
			events: `{"ImportPath":"p","Action":"build-output","Output":"undefined: x\n"}
{"ImportPath":"p","Action":"build-fail"}
{"Action":"start","Package":"p"}
{"Action":"output","Package":"p","Output":"FAIL p [build failed]\n"}
{"Action":"fail","Package":"p","FailedBuild":"p"}
`,
			figures: "0 passed, 1 failed, 0 skipped",
			printed: "undefined: x\nFAIL p [build failed]\n",
		},
		{
			name:    "no test at all is not ok, and other text is passed on",
			events:  "no packages to test\n",
			figures: "0 passed, 0 skipped",
			printed: "no packages to test\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			r := newRun(&out)
			r.read(strings.NewReader(c.events))
			if got := r.figures(); got != c.figures {
				t.Errorf("figures: got %q, want %q", got, c.figures)
			}
			if out.String() != c.printed {
				t.Errorf("printed: got %q, want %q", out.String(), c.printed)
			}
			if r.ok() != c.ok {
				t.Errorf("ok: got %v, want %v", r.ok(), c.ok)
			}
		})
	}
}
