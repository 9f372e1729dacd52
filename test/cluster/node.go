package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// powerOn starts a node: its namespaces, and in them an init that starts containerd, kubelet and kube-proxy.
func (c *Cluster) powerOn(ctx context.Context, name string) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if c.process(n.Name).alive() {
		return nil
	}
	// A powered-off node leaves its cgroups; the kubelet would need a minute to tidy them.
	if err := n.removeCgroups(); err != nil {
		return err
	}
	if err := n.makeCgroups(); err != nil {
		return err
	}
	if err := c.writeNode(n); err != nil {
		return err
	}
	self := c.path("bin", "cluster")
	args := append([]string{self, "in-cgroup", n.Name}, n.inNet("unshare", "--cgroup", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc",
		self, "--state", c.Dir, "node-init", n.Name)...)
	return c.start(n.Name, nil, args...)
}

// stopNode powers a node off: its init is killed, and with it everything in its process namespace.
func (c *Cluster) stopNode(name string) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	p := c.process(n.Name)
	if p.alive() {
		// unshare --kill-child: the init goes with its parent, and everything in its namespace with the init.
		if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil {
			return fmt.Errorf("power %s off: %w", name, err)
		}
	}
	if err := p.stop(5 * time.Second); err != nil {
		return err
	}
	return n.removeCgroups()
}

func (c *Cluster) node(name string) (node, error) {
	var names []string
	for i := range c.Config.Nodes {
		n := newNode(i + 1)
		if n.Name == name {
			return n, nil
		}
		names = append(names, n.Name)
	}
	return node{}, fmt.Errorf("node %q: there are %s", name, strings.Join(names, ", "))
}

// folders of a node's own, below the state folder, and where the node sees them.
func (c *Cluster) folders(n node) map[string]string {
	return map[string]string{
		c.path(n.Name, "lib"): "/var/lib",
		c.path(n.Name, "log"): "/var/log",
	}
}

// writeNode writes the configuration of the node's programs.
func (c *Cluster) writeNode(n node) error {
	for folder := range c.folders(n) {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(c.path(n.Name, "cni"), 0o755); err != nil {
		return err
	}
	for file, text := range map[string]string{
		"containerd.toml":      containerdConfig(c.path(n.Name)),
		"cni/10-pods.conflist": cniConfig(n),
		"kubelet.yaml":         kubeletConfig(c.path("pki"), n, c.Config.MaxPods),
		"kube-proxy.yaml":      kubeProxyConfig(c.kubeconfig("kproxy")),
	} {
		if err := os.WriteFile(c.path(n.Name, file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// containerdConfig: restrict_oom_score_adj because a container without CAP_SYS_RESOURCE may not lower oom_score_adj.
func containerdConfig(dir string) string {
	return fmt.Sprintf(`version = 2
root = "%[1]s/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %[2]q
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = %[3]q
conf_dir = "%[1]s/cni"
`, dir, pauseImage, cniFolder)
}

func cniConfig(n node) string {
	return fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "/run/ipam", "ranges": [[{"subnet": %q}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
`, n.Pods)
}

// kubeletConfig: leases and status are quick, so that a dead node is noticed in seconds. localStorageCapacityIsolation stays on:
// without it the eviction manager logs errors all the time.
func kubeletConfig(pki string, n node, maxPods int) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[1]s/ca.crt}}
authorization: {mode: Webhook}
clusterDomain: cluster.local
clusterDNS: [%[3]s]
tlsCertFile: %[1]s/%[2]s.crt
tlsPrivateKeyFile: %[1]s/%[2]s.key
resolvConf: ""
enforceNodeAllocatable: []
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
nodeLeaseDurationSeconds: 4
nodeStatusUpdateFrequency: 2s
registryPullQPS: 0
serializeImagePulls: false
maxPods: %[4]d
`, pki, n.Name, serviceIP(10), maxPods)
}

// kubeProxyConfig: conntrack maxPerCore 0 leaves the machine's sysctls alone, which may be read-only.
func kubeProxyConfig(kubeconfig string) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %s}
clusterCIDR: %s
mode: iptables
conntrack: {maxPerCore: 0}
iptables: {minSyncPeriod: 0s}
`, kubeconfig, podRange)
}

// nodeInit is process 1 of a node: it makes the node's own mounts, starts its programs, starts again what ends, and collects
// orphans. It runs until it is killed.
func nodeInit(dir, name string) error {
	c := &Cluster{Dir: dir}
	if err := c.read(); err != nil {
		return err
	}
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if err := c.mountNode(n); err != nil {
		return err
	}
	socket := "/run/containerd/containerd.sock"
	programs := map[string][]string{
		"containerd": {"containerd", "-c", c.path(n.Name, "containerd.toml")},
		"kubelet": {"kubelet", "--kubeconfig=" + c.kubeconfig(n.Name), "--config=" + c.path(n.Name, "kubelet.yaml"), "--hostname-override=" + n.Name,
			"--node-ip=" + n.IP, "--node-labels=node-type=gpu"},
		"kube-proxy": {"kube-proxy", "--config=" + c.path(n.Name, "kube-proxy.yaml"), "--hostname-override=" + n.Name},
	}
	running := map[int]string{}
	launch := func(program string) error {
		log, err := os.OpenFile(c.path("log", program+"-"+n.Name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
		if err != nil {
			return err
		}
		defer log.Close()
		path, err := exec.LookPath(programs[program][0])
		if err != nil {
			return err
		}
		p, err := os.StartProcess(path, programs[program], &os.ProcAttr{Files: []*os.File{nil, log, log}, Env: os.Environ(), Dir: "/"})
		if err != nil {
			return fmt.Errorf("start %s: %w", program, err)
		}
		running[p.Pid] = program
		return p.Release()
	}
	if err := launch("containerd"); err != nil {
		return err
	}
	for range 200 {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err := os.WriteFile(c.path(n.Name, "ready"), []byte(readyMark()), 0o644); err != nil {
		return err
	}
	for _, program := range []string{"kubelet", "kube-proxy"} {
		if err := launch(program); err != nil {
			return err
		}
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the node's programs: %w", err)
		}
		if program, ok := running[pid]; ok {
			delete(running, pid)
			fmt.Fprintf(os.Stderr, "%s ended (status %d), starting it again\n", program, status.ExitStatus())
			time.Sleep(time.Second)
			if err := launch(program); err != nil {
				return err
			}
		}
	}
}

// readyMark tells one start of a node from the next: the init's own start.
func readyMark() string {
	began, _ := startOf(os.Getpid())
	return began
}

// mountNode gives the node its own /var/lib, /var/log, /run and cgroups.
func (c *Cluster) mountNode(n node) error {
	mount := func(source, target, kind string, flags uintptr, data string) error {
		if err := syscall.Mount(source, target, kind, flags, data); err != nil {
			return fmt.Errorf("mount %s: %w", target, err)
		}
		return nil
	}
	// Private, so that nothing of ours shows outside; shared among ourselves, so that containers see each other's mounts.
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil {
		return err
	}
	if err := syscall.Sethostname([]byte(n.Name)); err != nil {
		return err
	}
	if err := remountCgroups(); err != nil {
		return err
	}
	for source, target := range c.folders(n) {
		if err := mount(source, target, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return err
		}
	}
	if err := mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, dir := range []string{"/run/containerd", "/run/lock", "/run/netns", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// inNode is a command line that runs a program inside a running node.
func (c *Cluster) inNode(n node, args ...string) ([]string, error) {
	p := c.process(n.Name)
	if !p.alive() {
		return nil, fmt.Errorf("%s is off", n.Name)
	}
	init, err := onlyChild(p.PID)
	for range 100 { // unshare may not have forked yet
		if err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
		init, err = onlyChild(p.PID)
	}
	if err != nil {
		return nil, fmt.Errorf("find the init of %s: %w", n.Name, err)
	}
	return append([]string{"nsenter", "-t", fmt.Sprint(init), "--mount", "--pid", "--net", "--uts", "--ipc", "--"}, args...), nil
}

// onlyChild is the process that "unshare --fork" started.
func onlyChild(pid int) (int, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0, err
	}
	var child int
	if _, err := fmt.Sscan(string(data), &child); err != nil {
		return 0, fmt.Errorf("process %d has no child: %w", pid, err)
	}
	return child, nil
}
