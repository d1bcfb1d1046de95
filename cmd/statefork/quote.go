package main

import (
	"fmt"
	"strings"

	"github.com/statefork/statefork/statefork/waypoint"
)

// shellText makes the text for a shell: one argument is that already, several
// are words of which the shell shall see nothing but the words.
func shellText(args []string) string {
	if len(args) == 1 {
		return args[0]
	}
	words := make([]string, 0, len(args))
	for i, arg := range args {
		// A quoted first word is no keyword, no alias and no assignment.
		words = append(words, quote(arg, i == 0))
	}
	return strings.Join(words, " ")
}

// plain are the characters that no shell has a use for inside of a word.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:@+%"

// quote makes a word of any string: in single quotes all characters but the
// quote itself stand for themselves.
func quote(word string, always bool) string {
	if !always && word != "" && strings.Trim(word, plain) == "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// reference is how a step is named on this command line.
func reference(container string, r waypoint.StepRef) string {
	return fmt.Sprintf("%s %s --step %d", quote(container, false), r.Session, r.Step)
}

// unescape replaces what stands for a character: \n \r \t \e \b \\, \xHH, and
// \cX for Ctrl-X.
func unescape(text string) ([]byte, error) {
	var out []byte
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' {
			out = append(out, text[i])
			continue
		}
		c, n, ok := escape(text[i+1:])
		if !ok {
			return nil, usagef(`escape %q: \n, \r, \t, \e, \b, \\, \xHH and \cX are known`, text[i:min(i+4, len(text))])
		}
		out = append(out, c)
		i += n
	}
	return out, nil
}

// escape reads what follows a backslash, and tells how long that is.
func escape(s string) (c byte, n int, ok bool) {
	if s == "" {
		return 0, 0, false
	}
	if i := strings.IndexByte(`nrteb\`, s[0]); i >= 0 {
		return "\n\r\t\x1b\b\\"[i], 1, true
	}
	switch {
	case s[0] == 'x' && len(s) >= 3:
		_, err := fmt.Sscanf(s[1:3], "%02x", &c)
		return c, 3, err == nil && strings.Trim(s[1:3], "0123456789abcdefABCDEF") == ""
	case s[0] == 'c' && len(s) >= 2:
		keys, err := waypoint.ParseKeys("ctrl-" + s[1:2])
		if err != nil || len(keys) != 1 {
			return 0, 0, false
		}
		return keys[0], 2, true
	}
	return 0, 0, false
}
