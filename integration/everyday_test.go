package integration_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/statefork/statefork/integration/testbed"
)

// everyday are commands as people type them, each with what it must print for
// one runtime as for the other. $RUN is "nerdctl run" with the runtime, $CREATE
// "nerdctl create"; $IMAGE has busybox in it; $NET is a bridge network.
var everyday = []string{
	// one command, and what it is given
	`$RUN --rm $IMAGE echo hello`,
	`$RUN --rm $IMAGE sh -c 'echo out; echo err >&2; exit 3'`,
	`echo typed | $RUN -i --rm $IMAGE head -1`,
	`script -qec "$RUN -it --rm $IMAGE sh -c 'test -t 0 && test -t 1 && echo on a terminal; exit 4'" /dev/null`,
	`$RUN --rm -e A=b -w /tmp -u user -h here $IMAGE sh -c 'echo $A; pwd; id; hostname; touch /x'`,
	`$RUN --rm $IMAGE ps -o pid,args`,
	`$RUN --rm $IMAGE grep -E 'Cap|NoNewPrivs|Seccomp' /proc/self/status`,
	`$RUN --rm --privileged $IMAGE sh -c "grep -E 'Cap|NoNewPrivs|Seccomp' /proc/self/status; ls /dev | grep -c ."`,
	`$RUN --rm --cap-drop ALL --cap-add NET_RAW --security-opt no-new-privileges $IMAGE grep -E 'Cap|NoNewPrivs' /proc/self/status`,
	`$RUN --rm --read-only --tmpfs /t:size=1m $IMAGE sh -c 'touch /x; touch /t/x && ls /t; df -m /t | tail -1'`,
	`$RUN --rm --ulimit nofile=100:200 --shm-size 2m $IMAGE sh -c 'ulimit -n; ulimit -Hn; df -m /dev/shm | tail -1'`,
	`$RUN --rm $IMAGE ls /proc/kcore /proc/latency_stats /sys/firmware`,
	`$RUN --rm $IMAGE no-such-program`,
	`$RUN --rm --pid host --uts host $IMAGE sh -c 'test $$ -gt 100 && echo among the processes of the host'`,
	`$RUN --rm $IMAGE sh -c 'kill -9 $$'`,

	// a server with a network, a port and a volume
	`nerdctl volume create vol; nerdctl volume ls -q; nerdctl volume inspect -f '{{.Name}}' vol`,
	`nerdctl network ls --format '{{.Name}}' | grep "^$NET$"; nerdctl network inspect -f '{{(index .IPAM.Config 0).Subnet}}' $NET`,
	`$RUN -d --name web --net $NET -p 127.0.0.1:$PORT:80 -v vol:/data --label role=server --memory 64m --pids-limit 50 --cpus 0.5 $IMAGE ` +
		`sh -c 'trap "echo usr1" USR1; trap "exit 5" TERM; echo page >/data/index.html; httpd -p 80 -h /data; echo ready; while :; do sleep 0.1; done'`,
	`for i in $(seq 60); do busybox wget -qO- http://127.0.0.1:$PORT/ 2>/dev/null && break; sleep 0.5; done`,
	`nerdctl ps --format '{{.Names}} {{.Image}} {{.Status}} {{.Ports}}'; nerdctl ps -q --filter label=role=server | grep -c .`,
	`nerdctl port web; nerdctl port web 80/tcp`,
	`nerdctl inspect -f '{{.State.Status}} {{.State.Running}} {{.State.ExitCode}} {{.RestartCount}} {{.HostConfig.Memory}} {{.Config.Hostname}} {{range .Mounts}}{{.Type}} {{.Name}} {{.Destination}}{{end}}' web`,
	`nerdctl exec web sh -c 'cat /data/index.html; exit 6'`,
	`echo typed | nerdctl exec -i web cat; nerdctl exec -u user -w /tmp -e A=b web sh -c 'id -un; pwd; echo $A'`,
	`script -qec "nerdctl exec -it web sh -c 'test -t 0 && echo on a terminal'" /dev/null`,
	`nerdctl exec -d web sh -c 'echo detached >/detached'; until nerdctl exec web cat /detached 2>/dev/null; do sleep 0.2; done`,
	`nerdctl exec web no-such-program`,
	`nerdctl exec web sh -c 'cat /etc/hostname /etc/hosts | grep -c .; ip -o -4 addr show eth0; ip route'`,
	`$RUN --rm --net $NET $IMAGE wget -qO- http://$(nerdctl inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' web)/`,
	`$RUN --rm --net container:web $IMAGE wget -qO- http://127.0.0.1/`,
	`nerdctl logs web; nerdctl logs -n 1 web`,
	`nerdctl kill -s USR1 web; until nerdctl logs web | grep usr1; do sleep 0.2; done`,
	`nerdctl top web -o pid,args | awk '{$1 = ""; print}' | grep -v sleep | sort | uniq`,
	`nerdctl stats --no-stream --format '{{.Name}} {{.MemUsage}}' web`,
	`nerdctl pause web; nerdctl ps --format '{{.Names}} {{.Status}}'; nerdctl exec web true 2>/dev/null || echo refused; nerdctl unpause web; nerdctl inspect -f '{{.State.Status}}' web`,
	`nerdctl update --memory 96m --pids-limit 60 web; nerdctl inspect -f '{{.HostConfig.Memory}}' web`,
	`nerdctl exec web sh -c 'cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/memory.max /sys/fs/cgroup/pids.max 2>/dev/null'`,
	`echo from outside >f; nerdctl cp f web:/tmp/f; nerdctl exec web cat /tmp/f; nerdctl cp web:/etc/passwd .; cat passwd; nerdctl cp web:/tmp - | tar t`,
	`nerdctl exec web sh -c 'rm /etc/base; echo new >/etc/new'; nerdctl diff web | sort`,
	`nerdctl commit web localhost/made >/dev/null; $RUN --rm localhost/made sh -c 'cat /etc/new /tmp/f; ls /etc/base'`,
	`nerdctl export web | tar t | grep -E '^(etc|tmp)/'`,
	`nerdctl rename web www; nerdctl ps --format '{{.Names}}'; nerdctl rename www web`,
	`nerdctl rm web; nerdctl ps -q | grep -c .`,
	`nerdctl stop -t 20 web; nerdctl wait web; nerdctl ps -a --format '{{.Names}} {{.Status}}'`,
	`nerdctl start web; nerdctl exec web cat /tmp/f /etc/new; nerdctl restart -t 20 web; nerdctl inspect -f '{{.State.Status}}' web`,
	`nerdctl kill web; nerdctl wait web; nerdctl rm web; nerdctl ps -aq; nerdctl volume rm vol; nerdctl volume ls -q`,

	// others in the background
	`$CREATE --name later $IMAGE sh -c 'echo now; exit 2'; nerdctl ps -a --format '{{.Names}} {{.Status}}'; nerdctl start -a later; nerdctl rm later`,
	`$RUN -d --name talk $IMAGE sh -c 'for i in 1 2 3; do echo line $i; sleep 0.3; done; echo oops >&2'; nerdctl logs -f talk; nerdctl logs talk 2>/dev/null; nerdctl rm -f talk`,
	// detached by its keys, and attached again
	`(until nerdctl ps | grep -q shell; do sleep 0.2; done; sleep 1; printf '\020\021'; sleep 1) | script -qec "$RUN -it --name shell $IMAGE sh -c 'read x; echo got \$x; exit 8'" /dev/null >/dev/null; ` +
		`nerdctl ps --format '{{.Names}} {{.Status}}'; ` +
		`(sleep 1; echo this; until nerdctl ps -a | grep -q Exited; do sleep 0.2; done) | script -qec 'nerdctl attach shell; echo code $?' /dev/null | tr -d '\r' | grep -E '^(got|code)'; ` +
		`nerdctl wait shell; nerdctl rm shell`,
	`$RUN -d --name one $IMAGE sleep inf; $RUN -d --name two $IMAGE sleep inf; nerdctl stop -t 0 one; nerdctl container prune -f; nerdctl ps --format '{{.Names}}'; nerdctl rm -f one two`,

	// images; an archive that nerdctl writes to a pipe lacks its end now and then
	`nerdctl tag $IMAGE localhost/other:1; nerdctl images --format '{{.Repository}}:{{.Tag}}' | sort; nerdctl history -q $IMAGE | grep -c .; nerdctl rmi localhost/other:1 localhost/made`,
	`nerdctl save -o image.tar $IMAGE; tar tf image.tar | grep -c blobs; nerdctl image inspect -f '{{.Config.Cmd}} {{.Architecture}}' $IMAGE`,

	// several containers together
	`nerdctl compose -f compose.yaml up -d 2>/dev/null; nerdctl compose -f compose.yaml ps --format json | grep -o '"State":"[a-z]*"'`,
	`nerdctl compose -f compose.yaml exec -T client sh -c 'for i in $(seq 60); do wget -qO- http://server/ 2>/dev/null && break; sleep 0.5; done'`,
	`nerdctl compose -f compose.yaml logs server | tail -1; nerdctl compose -f compose.yaml down 2>/dev/null; nerdctl ps -aq; nerdctl network ls --format '{{.Name}}' | grep project`,

	// checkpoints by the standard calls
	`$RUN -d --name counts --net none $IMAGE sh -c 'i=0; while :; do i=$((i+1)); echo $i >/t; mv /t /n; sleep 0.1; done'; until nerdctl exec counts test -s /n 2>/dev/null; do sleep 0.1; done; ` +
		`nerdctl checkpoint create --leave-running counts c1; nerdctl checkpoint ls counts; nerdctl inspect -f '{{.State.Status}}' counts`,
	`n=$(nerdctl exec counts cat /n); nerdctl kill counts; nerdctl wait counts; nerdctl start --checkpoint c1 counts; until m=$(nerdctl exec counts cat /n) && [ "$m" -gt "$n" ]; do sleep 0.1; done; nerdctl inspect -f '{{.State.Status}}' counts`,
	`nerdctl checkpoint rm counts c1; nerdctl checkpoint ls counts; nerdctl rm -f counts`,
}

const everydayCompose = `name: %[4]s
services:
  server:
    image: %[1]s
    runtime: %[2]s
    networks: [inner]
    command: ["sh", "-c", "mkdir /w; echo served >/w/index.html; echo serving; exec httpd -f -p 80 -h /w"]
  client:
    image: %[1]s
    runtime: %[2]s
    networks: [inner]
    depends_on: [server]
    command: ["sleep", "inf"]
networks:
  inner:
    ipam:
      config: [{subnet: %[3]s}]
`

// TestEveryday types each command with runc's shim and with ours, which must
// answer alike.
func TestEveryday(t *testing.T) {
	t.Parallel()
	tb := apart(t)
	people := []*person{
		{runtime: "io.containerd.runc.v2", snapshotter: testbed.Stock, net: "runcnet", subnet: "10.71", port: "8071"},
		{runtime: testbed.Runtime, snapshotter: testbed.Snapshotter, net: "ournet", subnet: "10.72", port: "8072"},
	}
	t.Run("both", func(t *testing.T) {
		for _, p := range people {
			t.Run(p.runtime, func(t *testing.T) {
				t.Parallel()
				p.work(setup(t, tb))
			})
		}
	})
	if t.Failed() {
		return
	}
	for i, command := range everyday {
		if runc, ours := people[0].seen[i], people[1].seen[i]; runc != ours {
			t.Errorf("%s\n--- with runc:\n%s\n--- with statefork:\n%s", command, runc, ours)
		}
	}
	if !t.Failed() {
		t.Logf("%d commands, the same with both", len(everyday))
	}
}

// person works with one runtime.
type person struct {
	runtime, snapshotter, net, subnet, port string
	// seen is what each command has shown.
	seen []string
}

func (p *person) work(e *env) {
	e.snapshotter = p.snapshotter
	e.must(e.ns.Nerdctl(e.ctx, "network", "create", "--subnet", p.subnet+".1.0/24", p.net))
	e.Cleanup(func() { e.must(e.ns.Nerdctl(e.cleanupContext(), "network", "rm", p.net)) })
	// nerdctl makes it for published ports, and leaves it.
	e.Cleanup(func() { _ = errors.Join(os.Remove("/run/nerdctl/"+e.ns.NS), os.Remove("/run/nerdctl")) })
	exits := e.watchExits()
	dir := p.desk(e)
	for i, command := range everyday {
		out, err := e.ns.Exec(e.ctx, "sh", "-c", "cd "+dir+" && . ./profile && "+command)
		if e.ctx.Err() != nil {
			e.Fatal(err)
		}
		shown := fmt.Sprintf("%s%sexit code %d", out.Stdout, out.Stderr, out.Code)
		p.seen = append(p.seen, p.alike(e, shown))
		e.Logf("%d: %s\n%s", i+1, command, p.seen[i])
	}
	for _, id := range exits.ids() {
		e.removePipes(id)
	}
}

// removePipes removes what "nerdctl exec -d" leaves of its process.
func (e *env) removePipes(execID string) {
	e.Helper()
	pipes, err := filepath.Glob("/run/containerd/fifo/*/" + execID + "-std*")
	if err != nil {
		e.Fatal(err)
	}
	for _, pipe := range pipes {
		if err := os.RemoveAll(filepath.Dir(pipe)); err != nil {
			e.Error(err)
		}
	}
}

// desk is a directory with what the commands need.
func (p *person) desk(e *env) string {
	dir := e.TempDir()
	global := fmt.Sprintf("nerdctl --namespace %s --snapshotter %s", e.ns.NS, p.snapshotter)
	run := fmt.Sprintf(" --runtime %s --pull never", p.runtime)
	profile := fmt.Sprintf("mkdir -p bin; PATH=$PWD/bin:$PATH; IMAGE=%s NET=%s PORT=%s RUN='nerdctl run%s' CREATE='nerdctl create%s'\n",
		testbed.Busybox, p.net, p.port, run, run)
	for name, content := range map[string]string{
		"profile":      profile,
		"compose.yaml": fmt.Sprintf(everydayCompose, testbed.Busybox, p.runtime, p.subnet+".2.0/24", p.net+"project"),
		"bin/nerdctl":  "#!/bin/sh\nPATH=${PATH#*:}\nexec " + global + " \"$@\"\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			e.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			e.Fatal(err)
		}
	}
	return dir
}

// different is what differs from run to run, and by what it is replaced.
var different = []struct {
	is *regexp.Regexp
	as string
}{
	{regexp.MustCompile(`\b[0-9a-f]{64}\b`), "ID"},
	{regexp.MustCompile(`\b[0-9a-f]{12}\b`), "ID"},
	{regexp.MustCompile(`time="[^"]*"`), "TIME"},
	{regexp.MustCompile(`Up (Less than a second|About a minute|[0-9]+ (seconds?|minutes?))`), "Up TIME"},
	{regexp.MustCompile(`(Less than a second|About a minute|[0-9]+ (seconds?|minutes?)) ago`), "TIME ago"},
	{regexp.MustCompile(`[0-9.]+[KM]iB /`), "SOME /"},
	// where an error came from
	{regexp.MustCompile(`msg="(?:[^"\\]|\\.)*?(unable to start container process)`), `msg="$1`},
	// nerdctl has sent a signal on to a container that had ended
	{regexp.MustCompile(`TIME level=error msg="forward signal child exited".*\n`), ""},
	// what script adds when its input ends
	{regexp.MustCompile(`\^@`), ""},
}

// alike takes away what is this person's own.
func (p *person) alike(e *env, shown string) string {
	shown = strings.NewReplacer(e.ns.NS, "NAMESPACE", p.runtime, "RUNTIME", p.snapshotter, "SNAPSHOTTER",
		p.net, "NET", p.subnet+".", "SUBNET.", p.port, "PORT", "\r", "", "\x00", "").Replace(shown)
	for _, d := range different {
		shown = d.is.ReplaceAllString(shown, d.as)
	}
	return shown
}
