package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

func TestAddressesOfAnyNumberOfNodes(t *testing.T) {
	seen := map[string]bool{}
	_, services, err := net.ParseCIDR(serviceRange)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		n := newNode(i + 1)
		ip, gateway := net.ParseIP(n.IP), net.ParseIP(n.Gateway)
		_, pods, err := net.ParseCIDR(n.Pods)
		if ip == nil || gateway == nil || err != nil || services.Contains(ip) || pods.Contains(ip) {
			t.Errorf("%+v: %v", n, err)
		}
		for _, x := range []string{n.Name, n.IP, n.Gateway, n.Pods, n.netns()} {
			if seen[x] {
				t.Errorf("%s is given twice", x)
			}
			seen[x] = true
		}
	}
}

func TestHierarchies(t *testing.T) {
	const (
		v1 = `31 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
33 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
34 31 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
35 31 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
`
		v2 = "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	)
	for text, want := range map[string][]hierarchy{
		v1: {{Mount: "/sys/fs/cgroup/cpu,cpuacct", Version: 1, Options: "cpu,cpuacct"}, {Mount: "/sys/fs/cgroup/memory", Version: 1, Options: "memory"},
			{Mount: "/sys/fs/cgroup/systemd", Version: 1, Options: "none,name=systemd"}, {Mount: "/sys/fs/cgroup/unified", Version: 2, Hybrid: true}},
		v2:                                    {{Mount: "/sys/fs/cgroup", Version: 2}},
		"1 2 0:1 / / rw - ext4 /dev/vda rw\n": nil,
		"rubbish":                             nil,
	} {
		if got := parseHierarchies(text); !reflect.DeepEqual(got, want) {
			t.Errorf("%s\ngot %+v, want %+v", text, got, want)
		}
	}
	if got := newNode(2).cgroup(hierarchy{Mount: "/sys/fs/cgroup"}); got != "/sys/fs/cgroup/capstan-node-2" {
		t.Errorf("cgroup %s", got)
	}
}

func TestParseStat(t *testing.T) {
	began, state := parseStat("4711 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654 20")
	if began != "987654" || state != "S" {
		t.Errorf("began %q, state %q", began, state)
	}
	for _, bad := range []string{"", "1 (x", "1 (x) S 1"} {
		if began, _ := parseStat(bad); began != "" {
			t.Errorf("%q began %q", bad, began)
		}
	}
	if began, _ := startOf(os.Getpid()); began == "" {
		t.Error("this very process has not begun")
	}
}

// A pid that the kernel gave to somebody else is nobody of ours.
func TestStopsOnlyItsOwn(t *testing.T) {
	c := &Cluster{Dir: t.TempDir()}
	for _, sub := range []string{"run", "log"} {
		if err := os.MkdirAll(c.path(sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("needs sleep")
	}
	if err := c.start("sleeper", nil, sleep, "60"); err != nil {
		t.Fatal(err)
	}
	p := c.process("sleeper")
	if !p.alive() {
		t.Fatal("it was started and is not alive")
	}
	other := &process{file: c.path("run", "other.json"), PID: p.PID, Began: "1"}
	if err := other.stop(time.Second); err != nil || !p.alive() {
		t.Errorf("a record of another start ended it: %v", err)
	}
	if err := p.stop(time.Second); err != nil || p.alive() {
		t.Errorf("it goes on: %v", err)
	}
}

func TestConfigSaysWhatIsWrong(t *testing.T) {
	good := Config{Nodes: 2, HPASync: "5s", HPADown: "20s", MaxPods: 110}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*Config){
		"--nodes 0: must be 1 to 50":    func(c *Config) { c.Nodes = 0 },
		`--hpa-sync-period "5"`:         func(c *Config) { c.HPASync = "5" },
		"--max-pods 1: must be 5":       func(c *Config) { c.MaxPods = 1 },
		`downscale-stabilization "-1s"`: func(c *Config) { c.HPADown = "-1s" },
	} {
		c := good
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := Up(t.Context(), "/var/lib/x", good, io.Discard); err == nil || !strings.Contains(err.Error(), "a node has its own /var/lib") {
		t.Errorf("a state folder that the nodes would not see: %v", err)
	}
}

func TestFilesOfANodeAreYAML(t *testing.T) {
	for name, text := range map[string]string{"kubelet": kubeletConfig("/pki", newNode(2), 110), "proxy": kubeProxyConfig("/k"), "cni": cniConfig(newNode(2))} {
		var got map[string]any
		if err := yaml.UnmarshalStrict([]byte(text), &got); err != nil || len(got) == 0 {
			t.Errorf("%s: %v\n%s", name, err, text)
		}
	}
	for _, document := range strings.Split(fmt.Sprintf(dnsManifest, "image", "10.96.0.10"), "---\n") {
		var got map[string]any
		if err := yaml.UnmarshalStrict([]byte(document), &got); err != nil || got["kind"] == "" {
			t.Errorf("%v\n%s", err, document)
		}
	}
}

func TestMissingPackages(t *testing.T) {
	none := func(string) (string, error) { return "", exec.ErrNotFound }
	got := missingPackages(none, func(string) bool { return false })
	if want := "containerd runc iptables iproute2 conntrack util-linux mount containernetworking-plugins"; strings.Join(got, " ") != want {
		t.Errorf("a bare machine lacks %v, want %s", got, want)
	}
	if got := missingPackages(none, func(string) bool { return true }); len(got) != 0 {
		t.Errorf("with all of it in /usr/sbin it lacks %v", got)
	}
}

// The versions in code and in go.mod are one.
func TestVersions(t *testing.T) {
	data, err := os.ReadFile("components/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(data), "k8s.io/kubernetes v"+kubernetesVersion+"\n") {
		t.Errorf("components/go.mod does not require k8s.io/kubernetes v%s", kubernetesVersion)
	}
}

// The door forwards both ways, and passes on the end of each.
func TestDoor(t *testing.T) {
	inside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	go func() {
		c, err := inside.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		data, err := io.ReadAll(c) // until the client has no more to say
		if err == nil {
			_, _ = c.Write([]byte("heard " + string(data)))
		}
	}()
	outside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	go func() {
		if c, err := outside.Accept(); err == nil {
			forward(c.(*net.TCPConn), inside.Addr().String())
		}
	}()
	c, err := net.Dial("tcp", outside.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "heard hello" {
		t.Errorf("%q, %v", got, err)
	}
}

// cgroups lists every cgroup of this machine, whichever hierarchy it is in and whoever made it.
func cgroups(t *testing.T) (all []string) {
	t.Helper()
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			all = append(all, path)
		}
		return nil // one that ends this moment is no error
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// missingFrom lists what of all is not in known.
func missingFrom(all, known []string) (more []string) {
	for _, a := range all {
		if !slices.Contains(known, a) {
			more = append(more, a)
		}
	}
	return more
}

// A whole life: up, up again, a pod that resolves a headless Service, a node off and on, down, and nothing left.
func TestLife(t *testing.T) {
	if os.Getenv("CAPSTAN_CLUSTER") == "" {
		t.Skip("needs root, Linux and a minute: set CAPSTAN_CLUSTER=1 (as make test does)")
	}
	if readStatus(defaultState()).Running {
		t.Skip("another cluster runs on this machine, and its namespaces have the same names: go run ./test/cluster down")
	}
	// The program as a whole: the nodes' init is its executable.
	program := filepath.Join(t.TempDir(), "cluster")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	dir := filepath.Join("/var/tmp", fmt.Sprintf("capstan-cluster-test-%d", os.Getpid()))
	cluster := func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, program, append([]string{"--state", dir}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("cluster %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	t.Cleanup(func() { _ = exec.Command(program, "--state", dir, "down").Run() })

	before := cgroups(t)
	cluster("up", "--nodes", "3")
	if out := cluster("up", "--nodes", "3"); !strings.Contains(out, "the cluster runs already") {
		t.Errorf("up again says\n%s", out)
	}
	c := &Cluster{Dir: dir}
	if err := c.read(); err != nil {
		t.Fatal(err)
	}
	within := func(limit time.Duration, what string, check func() (bool, string)) {
		t.Helper()
		state := ""
		for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
			ok, now := check()
			if ok {
				return
			}
			state = now
		}
		t.Fatalf("%s: not within %s: %s", what, limit, state)
	}
	kubectl := func(args ...string) (string, error) { return c.kubectl(t.Context(), "", args...) }
	if _, err := c.kubectl(t.Context(), strings.ReplaceAll(probe, "IMAGE", coreDNSImage), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	within(time.Minute, "a pod of the headless Service is ready on node-3", func() (bool, string) {
		out, err := kubectl("get", "pod", "web-0", "-o", "jsonpath={.spec.nodeName} {.status.phase}")
		return err == nil && out == "node-3 Running", fmt.Sprint(out, err)
	})
	within(30*time.Second, "its name is served to pods", func() (bool, string) {
		ip, err := kubectl("get", "pod", "web-0", "-o", "jsonpath={.status.podIP}")
		if err != nil {
			return false, err.Error()
		}
		// Asked from node-2's network, of the cluster's name service by its Service address: kube-proxy, CoreDNS and the headless Service.
		args := newNode(2).inNet(os.Args[0], "-test.run", "^TestLookUp$")
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "TEST_LOOK_UP=web-0.web.default.svc.cluster.local", "TEST_SERVER="+serviceIP(10)+":53")
		out, err := cmd.Output()
		return err == nil && strings.Contains(string(out), "["+ip+"]"), fmt.Sprintf("%s, want %s (%v)", out, ip, err)
	})

	cluster("node", "stop", "node-3")
	ready := func() string {
		out, err := kubectl("get", "node", "node-3", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
		return fmt.Sprint(out, err)
	}
	within(30*time.Second, "node-3 is found to be off", func() (bool, string) { s := ready(); return strings.HasPrefix(s, "Unknown"), s })
	cluster("node", "start", "node-3")
	within(30*time.Second, "node-3 is back", func() (bool, string) { s := ready(); return strings.HasPrefix(s, "True"), s })

	cluster("down")
	if more := missingFrom(cgroups(t), before); len(more) > 0 {
		t.Errorf("cgroups that were not there before: %v", more)
	}
	for what, left := range map[string]func() bool{
		"its folder":        func() bool { _, err := os.Stat(dir); return err == nil },
		"network namespace": func() bool { _, err := os.Stat("/run/netns/capstan-node-1"); return err == nil },
		"mount": func() bool {
			data, err := os.ReadFile("/proc/self/mountinfo")
			return err != nil || strings.Contains(string(data), dir)
		},
		"process": func() bool {
			lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, l := range lines {
				if data, _ := os.ReadFile(l); strings.Contains(string(data), dir) {
					return true
				}
			}
			return err != nil
		},
	} {
		if left() {
			t.Errorf("down left something behind: %s", what)
		}
	}
}

// TestLookUp is run by TestLife in a node's network namespace: it prints the addresses of a name.
func TestLookUp(t *testing.T) {
	name := os.Getenv("TEST_LOOK_UP")
	if name == "" {
		t.Skip("TestLife runs this in a node's network namespace")
	}
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, os.Getenv("TEST_SERVER"))
	}}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	addresses, err := resolver.LookupHost(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(addresses)
}

const probe = `apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web}
spec:
  replicas: 1
  serviceName: web
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      nodeSelector: {kubernetes.io/hostname: node-3}
      containers: [{name: web, image: "IMAGE", imagePullPolicy: Never, args: ["-dns.port", "5353"]}]
`
