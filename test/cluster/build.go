package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/capstan-gpu/capstan/test/kept"
)

// The versions that go.mod of components and coredns pin; the test of this package holds them equal.
const kubernetesVersion = "1.37.2"

// binary is something that is built once from a module of its own and kept.
type binary struct {
	name, module, pkg, ldflags string
	links                      []string // names by which it is called, too
	long                       string   // what a person should know of how long it takes
}

func binaries() []binary {
	minor := strings.Split(kubernetesVersion, ".")[1]
	const version = "-X k8s.io/component-base/version."
	return []binary{
		{
			name: "components", module: "test/cluster/components", pkg: ".",
			ldflags: "-s -w " + version + "gitVersion=v" + kubernetesVersion + " " + version + "gitMajor=1 " + version + "gitMinor=" + minor,
			links:   []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"},
			long:    "Kubernetes v" + kubernetesVersion + " (five to ten minutes on two cores, the first time)",
		},
		{name: "coredns", module: "test/cluster/coredns", pkg: "github.com/coredns/coredns", ldflags: "-s -w", long: "CoreDNS (two minutes, the first time)"},
		{name: "pause", module: ".", pkg: "./test/cluster/pause", ldflags: "-s -w", long: "the pause program"},
	}
}

// buildAll builds what the cache lacks and returns the folder with all binaries of this version.
func buildAll(ctx context.Context, p *progress) (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	toolchain, err := kept.Toolchain(root)
	if err != nil {
		return "", err
	}
	key, err := cacheKey(root, toolchain)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(kept.Folder(), "cluster-"+kubernetesVersion+"-"+key)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, b := range binaries() {
		out := filepath.Join(dir, b.name)
		if _, err := os.Stat(out); err == nil {
			continue
		}
		err := p.during("building "+b.long, func() error {
			return kept.Build(ctx, toolchain, filepath.Join(root, b.module), b.pkg, out, "-ldflags", b.ldflags)
		})
		if err != nil {
			return "", err
		}
		for _, link := range b.links {
			if err := os.Symlink(b.name, filepath.Join(dir, link)); err != nil && !os.IsExist(err) {
				return "", err
			}
		}
	}
	return dir, nil
}

// cacheKey is a digest of everything that the binaries are made from.
func cacheKey(root, toolchain string) (string, error) {
	var lines []string
	for _, b := range binaries() {
		lines = append(lines, b.name+" "+b.ldflags)
	}
	files := []string{"components/go.mod", "components/go.sum", "components/main.go", "coredns/go.mod", "coredns/go.sum", "pause/main.go"}
	return kept.Key(toolchain, filepath.Join(root, "test", "cluster"), files, lines)
}

// needed are the programs of Debian's packages that a node is made of, and the package that brings each.
var needed = [][2]string{
	{"containerd", "containerd"}, {"ctr", "containerd"}, {"runc", "runc"}, {"iptables", "iptables"}, {"ip", "iproute2"},
	{"conntrack", "conntrack"}, {"unshare", "util-linux"}, {"nsenter", "util-linux"}, {"mount", "mount"},
}

const cniFolder = "/usr/lib/cni"

// packages makes sure that the machine has what a node is made of. It installs what is missing when it may, else names it.
func packages(ctx context.Context, p *progress) error {
	missing := missingPackages(exec.LookPath, func(path string) bool { _, err := os.Stat(path); return err == nil })
	if len(missing) == 0 {
		return nil
	}
	install := "apt-get install -y " + strings.Join(missing, " ")
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this machine lacks %s; install them with its package manager (on Debian: %s)", strings.Join(missing, ", "), install)
	}
	return p.during("installing "+strings.Join(missing, ", "), func() error {
		run := func(args ...string) error {
			cmd := exec.CommandContext(ctx, "apt-get", args...)
			cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w\n%s", install, err, out)
			}
			return nil
		}
		args := append([]string{"install", "-y", "-q", "--no-install-recommends"}, missing...)
		if run(args...) == nil {
			return nil
		}
		if err := run("update", "-q"); err != nil {
			return err
		}
		return run(args...)
	})
}

// missingPackages names the packages to install, each once.
func missingPackages(look func(string) (string, error), exists func(string) bool) (names []string) {
	seen := map[string]bool{}
	add := func(name string) {
		if !seen[name] {
			seen[name] = true
			names = append(names, name)
		}
	}
	for _, n := range needed {
		if _, err := look(n[0]); err != nil && !exists("/usr/sbin/"+n[0]) && !exists("/sbin/"+n[0]) {
			add(n[1])
		}
	}
	if !exists(filepath.Join(cniFolder, "bridge")) {
		add("containernetworking-plugins")
	}
	return names
}
