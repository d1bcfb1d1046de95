package shell

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// NewToken makes the token of a text.
func NewToken() (string, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return "", fmt.Errorf("make token: %w", err)
	}
	return hex.EncodeToString(b), nil
}

// Parser finds reports in what comes out of a report pipe, in pieces of any
// size. Its zero value expects nothing.
type Parser struct {
	token  string
	probe  bool
	fields []string
	field  []byte // the last one, whose end is to come
	size   int    // of fields
}

// Expect makes the report that has token the one that Feed returns. Reports
// with another one are dropped, and so is the beginning of one that was
// interrupted and begun again.
func (p *Parser) Expect(token string) { p.token, p.probe = token, false }

// ExpectProbe makes the answer to Probe with token what Feed returns: a State of
// which only Probed means anything.
func (p *Parser) ExpectProbe(token string) { p.token, p.probe = token, true }

// Token returns what Expect was given last.
func (p *Parser) Token() string { return p.token }

// Feed takes the next bytes. It returns a report as soon as it is whole, and how
// many of the bytes it has taken then.
func (p *Parser) Feed(b []byte) (n int, _ *State, _ error) {
	for n < len(b) {
		i := bytes.IndexByte(b[n:], 0)
		if i < 0 {
			p.field = append(p.field, b[n:]...)
			return len(b), nil, p.check()
		}
		p.field = append(p.field, b[n:n+i]...)
		n += i + 1
		f := string(p.field)
		p.field = p.field[:0]
		s, err := p.add(f)
		if s != nil || err != nil {
			return n, s, err
		}
	}
	return n, nil, nil
}

func (p *Parser) check() error {
	if size := p.size + len(p.field); size > MaxReport {
		p.fields, p.field, p.size = nil, nil, 0
		return fmt.Errorf("read report: more than %d bytes: %w", MaxReport, errdefs.ErrOutOfRange)
	}
	return nil
}

// add takes a field.
func (p *Parser) add(f string) (*State, error) {
	p.fields = append(p.fields, f)
	p.size += len(f) + 1
	if err := p.check(); err != nil {
		return nil, err
	}
	n := len(p.fields)
	switch {
	case p.probe && n >= 2 && f == p.token:
		found := p.fields[n-2]
		p.keep()
		return &State{found: found}, nil
	case n >= 2 && p.fields[n-2] == begin && f == p.token:
		p.keep(begin, f)
	case f == end+p.token:
		fields := p.fields
		p.keep()
		return parse(fields)
	case p.fields[0] != begin || n >= 2 && p.fields[1] != p.token:
		// Without our token yet only the last field can matter.
		p.keep(f)
	}
	return nil, nil
}

func (p *Parser) keep(fields ...string) {
	p.fields, p.size = fields, 0
	for _, f := range fields {
		p.size += len(f) + 1
	}
}

// Pending returns the beginning of a report, for another Parser to go on with.
func (p *Parser) Pending() []byte {
	var b []byte
	for _, f := range p.fields {
		b = append(append(b, f...), 0)
	}
	return append(b, p.field...)
}

// Probed returns the dialect that the answer to Probe tells of.
func (s *State) Probed() (Dialect, error) {
	switch strings.TrimSpace(s.found) {
	case "shopt\nlet":
		return Bash, nil
	case "let":
		return Ash, nil
	case "":
		return Dash, nil
	}
	return Unknown, fmt.Errorf("probe shell: it has %q: %w", s.found, errdefs.ErrNotImplemented)
}
