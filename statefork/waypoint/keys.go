package waypoint

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// DefaultDetachKeys end an Attach, as they do elsewhere.
const DefaultDetachKeys = "ctrl-p,ctrl-q"

// ParseKeys reads a sequence of keys, "ctrl-p,ctrl-q": characters, or "ctrl-"
// and a letter or one of @ [ \ ] ^ _, with commas between them. Nothing is
// no keys.
func ParseKeys(text string) ([]byte, error) {
	if text == "" {
		return nil, nil
	}
	var keys []byte
	for name := range strings.SplitSeq(text, ",") {
		key, ok := parseKey(name)
		if !ok {
			return nil, fmt.Errorf("key %q in %q: a character, or \"ctrl-\" and one, is possible: %w", name, text, errdefs.ErrInvalidArgument)
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func parseKey(name string) (byte, bool) {
	char, ctrl := strings.CutPrefix(name, "ctrl-")
	if len(char) != 1 || char[0] <= ' ' || char[0] > '~' {
		return 0, false
	}
	c := char[0]
	if !ctrl {
		return c, true
	}
	if 'a' <= c && c <= 'z' {
		c -= 'a' - 'A'
	}
	// The control characters are those from '@' to '_', less 64.
	if c < '@' || c > '_' {
		return 0, false
	}
	return c - '@', true
}

// keyFilter finds a sequence of keys in what is typed, and holds back what may
// be its beginning.
type keyFilter struct {
	keys, held []byte
}

// pass returns what of p is no part of the sequence, and whether the sequence
// is complete; what follows it is gone then.
func (f *keyFilter) pass(p []byte) (rest []byte, found bool) {
	if len(f.keys) == 0 {
		return p, false
	}
	for _, c := range p {
		f.held = append(f.held, c)
		for !bytes.HasPrefix(f.keys, f.held) {
			rest = append(rest, f.held[0])
			f.held = f.held[1:]
		}
		if len(f.held) == len(f.keys) {
			return rest, true
		}
	}
	return rest, false
}
