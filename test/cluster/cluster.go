package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Cluster is a cluster's state on disk. Dir/cluster.json records what up was asked for.
type Cluster struct {
	Dir string `json:"-"`

	Config   Config
	DoorPort int    // on 127.0.0.1
	Bin      string // folder of the built binaries
}

func (c *Cluster) path(elements ...string) string {
	return filepath.Join(append([]string{c.Dir}, elements...)...)
}
func (c *Cluster) bin(name string) string        { return filepath.Join(c.Bin, name) }
func (c *Cluster) kubeconfig(user string) string { return c.path(user + ".kubeconfig") }

// Kubeconfig is the administrator's, for programs on this machine.
func (c *Cluster) Kubeconfig() string { return c.kubeconfig("admin") }

func (c *Cluster) read() error {
	data, err := os.ReadFile(c.path("cluster.json"))
	if err != nil {
		return err
	}
	return json.Unmarshal(data, c)
}

func (c *Cluster) write() error {
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(c.path("cluster.json"), data, 0o644)
}

// Up starts the cluster and waits until every node is ready and names resolve. Where it runs already it says so, and starts again
// what has ended.
func Up(ctx context.Context, dir string, config Config, w io.Writer) error {
	p := &progress{w: w, began: time.Now()}
	for _, hidden := range []string{"/run", "/var/lib", "/var/log", "/proc", "/sys"} {
		if dir == hidden || strings.HasPrefix(dir, hidden+"/") {
			return fmt.Errorf("--state %s: a node has its own %s, so that the folder would be hidden from it; choose one elsewhere", dir, hidden)
		}
	}
	if err := packages(ctx, p); err != nil {
		return err
	}
	bin, err := buildAll(ctx, p)
	if err != nil {
		return err
	}
	c := &Cluster{Dir: dir}
	if err := c.read(); err == nil {
		if readStatus(dir).Running && c.Config != config {
			return fmt.Errorf("a cluster with %+v runs in %s and you asked for %+v; end it first: go run ./test/cluster down", c.Config, dir, config)
		}
		if readStatus(dir).Running && c.Bin == bin {
			if err := c.started(ctx, p); err != nil {
				return err
			}
			p.say("the cluster runs already; KUBECONFIG=%s", c.Kubeconfig())
			return nil
		}
		// Remains of one that was not ended properly, or of an older version.
		if err := Down(dir); err != nil {
			return err
		}
	}
	c.Config, c.Bin = config, bin
	for _, sub := range []string{"pki", "log", "run", "bin", "images"} {
		if err := os.MkdirAll(c.path(sub), 0o755); err != nil {
			return err
		}
	}
	if c.DoorPort, err = freePort(); err != nil {
		return err
	}
	if err := c.write(); err != nil {
		return err
	}
	// The nodes' init is this very program; "go run" removes its own copy.
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := copyFile(self, c.path("bin", "cluster")); err != nil {
		return err
	}
	if err := c.writeImages(); err != nil {
		return err
	}
	if err := c.writeKeys(); err != nil {
		return err
	}
	if err := c.started(ctx, p); err != nil {
		return err
	}
	p.say("%d nodes are ready; KUBECONFIG=%s", config.Nodes, c.Kubeconfig())
	return nil
}

// started brings up whatever of the cluster does not run.
func (c *Cluster) started(ctx context.Context, p *progress) error {
	for i := range c.Config.Nodes {
		if err := newNode(i + 1).connect(); err != nil {
			return err
		}
	}
	if err := c.openDoor(); err != nil {
		return err
	}
	p.say("starting the control plane")
	began := time.Now()
	if err := c.startControlPlane(ctx); err != nil {
		return err
	}
	p.say("starting %d nodes", c.Config.Nodes)
	for i := range c.Config.Nodes {
		if err := c.powerOn(ctx, newNode(i+1).Name); err != nil {
			return err
		}
	}
	if err := c.loadOwnImages(ctx); err != nil {
		return err
	}
	if err := c.applyDNS(ctx); err != nil {
		return err
	}
	return c.nodesReady(ctx, began)
}

// kubectl runs our own kubectl and returns its standard output.
func (c *Cluster) kubectl(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, c.bin("kubectl"), append([]string{"--kubeconfig", c.Kubeconfig()}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// nodesReady waits until every node has said so since this start (its lease is newer) and CoreDNS answers.
func (c *Cluster) nodesReady(ctx context.Context, since time.Time) error {
	for i := range c.Config.Nodes {
		n := newNode(i + 1)
		err := c.wait(ctx, 90*time.Second, n.Name, func() (bool, string) {
			state, err := c.kubectl(ctx, "", "get", "node", n.Name, "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`)
			if err != nil {
				return false, err.Error()
			}
			lease, err := c.kubectl(ctx, "", "-n", "kube-node-lease", "get", "lease", n.Name, "-o", "jsonpath={.spec.renewTime}")
			if err != nil {
				return false, err.Error()
			}
			renewed, err := time.Parse(time.RFC3339, lease)
			return err == nil && state == "True" && renewed.After(since.Add(-10*time.Second)), "Ready: " + state
		})
		if err != nil {
			return fmt.Errorf("%w\nsee also kubelet-%s.log and containerd-%s.log there", err, n.Name, n.Name)
		}
	}
	_, err := c.kubectl(ctx, "", "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=90s")
	return err
}

// Down ends everything that up started, and removes it: processes, namespaces with all that is in them, cgroups, files.
func Down(dir string) error {
	c := &Cluster{Dir: dir}
	if err := c.read(); err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return fmt.Errorf("read %s: %w", c.path("cluster.json"), err)
	}
	var errs []error
	for i := range c.Config.Nodes {
		errs = append(errs, c.stopNode(newNode(i+1).Name))
	}
	for _, name := range []string{"scheduler", "controller-manager", "apiserver", "etcd", "door"} {
		errs = append(errs, c.process(name).stop(time.Second))
	}
	for i := c.Config.Nodes; i > 0; i-- {
		errs = append(errs, newNode(i).disconnect())
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// The mounts went with the nodes' namespaces; the kernel may still be letting go of the last one.
	var err error
	for range 50 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("remove %s: %w", dir, err)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}
