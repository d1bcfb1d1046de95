package waypoint

import (
	"strings"
	"unicode/utf8"
)

// defaultOutputLimit is how much of a step's output is kept, here and by the
// shim.
const defaultOutputLimit = 16 << 20

// kept is output as a step keeps it: all up to a limit, of what is longer the
// first half of the limit and the last. The head also ends where something was
// missing.
type kept struct {
	half       int
	head, tail []byte
	// begin and next are the offsets where it begins and ends.
	begin, next uint64
	// full says that the head has ended.
	full bool
	// skipped is how much was not there to be read.
	skipped uint64
}

func newKept(limit, begin uint64) *kept {
	if limit == 0 {
		limit = defaultOutputLimit
	}
	return &kept{half: int(min(limit, 1<<40) / 2), begin: begin, next: begin}
}

// add adds what was printed at an offset.
func (k *kept) add(offset uint64, p []byte) {
	if len(p) == 0 {
		return
	}
	if offset > k.next {
		k.skipped += offset - k.next
		k.full, k.tail, k.next = true, nil, offset
	}
	k.next += uint64(len(p))
	if !k.full {
		n := min(len(p), k.half-len(k.head))
		k.head = append(k.head, p[:n]...)
		p = p[n:]
		k.full = len(k.head) == k.half
	}
	k.tail = append(k.tail, p...)
	if len(k.tail) > 2*k.half {
		k.trim()
	}
}

func (k *kept) trim() {
	if more := len(k.tail) - k.half; more > 0 {
		k.tail = append(k.tail[:0], k.tail[more:]...)
	}
}

// dropped is how much between the head and the tail is not kept.
func (k *kept) dropped() uint64 {
	k.trim()
	return k.next - k.begin - uint64(len(k.head)+len(k.tail))
}

func (k *kept) bytes() []byte {
	k.trim()
	out := make([]byte, 0, len(k.head)+len(k.tail))
	return append(append(out, k.head...), k.tail...)
}

// text is bytes as UTF-8, in which every byte that is none has become U+FFFD.
// What is on both sides of a gap is no character together.
func (k *kept) text() string {
	if k.dropped() == 0 {
		return lossy(k.bytes())
	}
	return lossy(k.head) + lossy(k.tail)
}

func lossy(p []byte) string {
	if utf8.Valid(p) {
		return string(p)
	}
	var b strings.Builder
	b.Grow(len(p))
	for len(p) > 0 {
		r, n := utf8.DecodeRune(p)
		b.WriteRune(r)
		p = p[n:]
	}
	return b.String()
}
