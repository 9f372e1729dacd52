package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// The versions that go.mod of components and coredns pin; the test of this package holds them equal.
const kubernetesVersion = "1.37.2"

// cacheFolder holds built binaries, outside the checkout, so that a fresh clone finds them.
func cacheFolder() string {
	if dir := os.Getenv("CAPSTAN_CACHE"); dir != "" {
		return dir
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		dir = "/var/cache"
	}
	return filepath.Join(dir, "capstan")
}

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
	toolchain, err := os.ReadFile(filepath.Join(root, "toolchain.txt"))
	if err != nil {
		return "", fmt.Errorf("read the toolchain's version: %w", err)
	}
	env := append(os.Environ(), "GOTOOLCHAIN="+strings.TrimSpace(string(toolchain)), "GOFLAGS=-trimpath -buildvcs=false", "GOWORK=off", "CGO_ENABLED=0")
	key, err := cacheKey(root, string(toolchain))
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cacheFolder(), "cluster-"+kubernetesVersion+"-"+key)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, b := range binaries() {
		out := filepath.Join(dir, b.name)
		if _, err := os.Stat(out); err == nil {
			continue
		}
		err := p.during("building "+b.long, func() error {
			cmd := exec.CommandContext(ctx, "go", "build", "-o", out+".new", "-ldflags", b.ldflags, b.pkg)
			cmd.Dir, cmd.Env = filepath.Join(root, b.module), env
			var output bytes.Buffer
			cmd.Stdout, cmd.Stderr = &output, &output
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("build %s: %w\n%s", b.name, err, output.String())
			}
			return os.Rename(out+".new", out)
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
	h := sha256.New()
	fmt.Fprintln(h, toolchain)
	for _, file := range []string{"components/go.mod", "components/go.sum", "components/main.go", "coredns/go.mod", "coredns/go.sum", "pause/main.go"} {
		data, err := os.ReadFile(filepath.Join(root, "test", "cluster", file))
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, file, len(data))
		h.Write(data)
	}
	for _, b := range binaries() {
		fmt.Fprintln(h, b.name, b.ldflags)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
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
