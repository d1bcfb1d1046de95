package main

import (
	"fmt"
	"strings"

	"github.com/statefork/statefork/statefork"
	"github.com/statefork/statefork/statefork/waypoint"
)

// tree draws the nodes with the oldest first, live forks as leaves; a fork whose
// node was removed stands at the top:
//
//	web  running  3 nodes
//	|-- 1f0c5be93a71  base  3m  1.2 MiB
//	|   |-- 8d20c4d1e6b7  -  2m  1.4 MiB
//	|   |   `-- (fork) web-fork-09c1d2  running
//	|   `-- * c41b9a77f002  tried  10s  1.4 MiB  <- head
func (o *output) tree(t *waypoint.Tree) error {
	if o.json {
		return o.asJSON(t)
	}
	var b strings.Builder
	name := t.Container.Name
	if name == "" {
		name = t.Container.ID
	}
	fmt.Fprintf(&b, "%s  %s  %s", name, t.Container.Status, count(t.Nodes.Len()))
	if from := t.Container.ForkedFrom; from != "" {
		fmt.Fprintf(&b, "  forked from %s", shortOrigin(from))
	}
	b.WriteByte('\n')
	o.draw(&b, "", t.Branches(), t.Rootless())
	if head := t.Container.Head; head != "" && len(t.Nodes.Path(head)) == 0 && t.Nodes.Len() > 0 {
		fmt.Fprintf(&b, "head is %s, which is not among them\n", head)
	}
	_, err := o.out.Write([]byte(b.String()))
	return err
}

func (o *output) draw(b *strings.Builder, indent string, nodes []waypoint.Branch, forks []statefork.Fork) {
	left := len(nodes) + len(forks)
	next := func() (edge, below string) {
		if left--; left == 0 {
			return indent + "`-- ", indent + "    "
		}
		return indent + "|-- ", indent + "|   "
	}
	for _, f := range forks {
		edge, _ := next()
		name := f.Name
		if name == "" {
			name = f.ID
		}
		fmt.Fprintf(b, "%s(fork) %s  %s\n", edge, name, f.Status)
	}
	for _, n := range nodes {
		edge, below := next()
		b.WriteString(edge)
		if n.Head {
			b.WriteString("* ")
		}
		fmt.Fprintf(b, "%s  %s  %s  %s", n.ID, dash(n.Name), age(o.now.Sub(n.Created)), size(n.ImageBytes))
		if n.Head {
			b.WriteString("  <- head")
		}
		b.WriteByte('\n')
		o.draw(b, below, n.Children, n.Forks)
	}
}

func count(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}
