// Package terminal keeps shells alive on pseudo terminals of a container and
// gives them commands.
//
// A session is one shell: the container's own program, a session leader with a
// terminal that has no name in the container (see Open), and a descendant of the
// container's init, so that it is dumped and restored with everything else. What
// is given to it to run is a step. A session runs one step at a time; its
// directory, variables, functions, options, jobs, umask and limits are those that
// the step before has left.
//
// # What crosses
//
// Three channels lead to a shell, none of which is visible in the container:
//
//	terminal  what programs read and print, nothing else
//	commands  a pipe that the shell runs as its script
//	reports   a pipe that the shell writes after each step: status and state
//
// See package shell for the text that goes through the pipes. A step has ended
// when its report is there; its output is what came from the terminal until
// then. What background processes print later belongs to the step that runs at
// that time, or to none: the session's log has it all.
//
// # The end of a shell
//
// "exit", "set -e" and a failing command, "kill $$" end the shell, and with it
// the step, whose result says so and has the shell's true status. The next step
// gets a new shell with the directory and the exported variables of the old one.
// "exec" of a program makes that the step's program; the shell has ended when
// the program does.
//
// # Generations
//
// A session goes through checkpoints with its container: the step that runs
// goes on, and who waits for it notices nothing. A restore to a node brings
// back the sessions and the steps of that moment; the generation counts these,
// and a step of another generation than the present one is refused as stale.
package terminal
