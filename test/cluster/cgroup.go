package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"
)

// hierarchy is one mounted cgroup hierarchy: with version 1 there is one for each controller, with version 2 there is one in all.
type hierarchy struct {
	Mount   string // where it is mounted
	Version int
	Options string // mount options that name its controllers (version 1)
	Hybrid  bool   // version 2 beside version 1, which has the controllers
}

// parseHierarchies reads /proc/self/mountinfo. Where version 1 has the controllers, a version 2 mount beside it is the node's, too: runc
// makes a cgroup there for each container, which would stay on this machine for ever.
func parseHierarchies(mountinfo string) (all []hierarchy) {
	seen := map[string]bool{}
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 || !strings.HasPrefix(left[4], "/sys/fs/cgroup") || seen[left[4]] {
			continue
		}
		seen[left[4]] = true
		switch right[0] {
		case "cgroup2":
			all = append(all, hierarchy{Mount: left[4], Version: 2})
		case "cgroup":
			var options []string
			for _, o := range strings.Split(right[2], ",") {
				if strings.HasPrefix(o, "name=") {
					options = append([]string{"none"}, o)
				} else if o != "rw" && o != "ro" && o != "clone_children" && !strings.HasPrefix(o, "release_agent") && o != "xattr" {
					options = append(options, o)
				}
			}
			all = append(all, hierarchy{Mount: left[4], Version: 1, Options: strings.Join(options, ",")})
		}
	}
	hybrid := slices.ContainsFunc(all, func(h hierarchy) bool { return h.Version == 1 })
	for i := range all {
		all[i].Hybrid = hybrid && all[i].Version == 2
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Mount < all[j].Mount })
	return all
}

func hierarchies() ([]hierarchy, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	all := parseHierarchies(string(data))
	if len(all) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted under /sys/fs/cgroup: mount one, as every distribution does")
	}
	return all, nil
}

// cgroup is the node's folder in a hierarchy.
func (n node) cgroup(h hierarchy) string { return filepath.Join(h.Mount, n.netns()) }

// makeCgroups makes the node's cgroup in every hierarchy.
func (n node) makeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		dir := n.cgroup(h)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if h.Version == 2 {
			if !h.Hybrid {
				if err := delegate(h.Mount); err != nil {
					return err
				}
			}
			continue
		}
		// A version 1 cpuset is empty until it is told; no process can enter an empty one.
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
			if data, err := os.ReadFile(filepath.Join(h.Mount, f)); err == nil {
				if err := os.WriteFile(filepath.Join(dir, f), data, 0o644); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// delegate hands every controller that a version 2 cgroup has to its children.
func delegate(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for _, controller := range strings.Fields(string(data)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("delegate %s below %s: %w", controller, dir, err)
		}
	}
	return nil
}

// removeCgroups removes the node's cgroups, children first. The last processes may still be on their way out.
func (n node) removeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		var left error
		for range 100 {
			if left = removeTree(n.cgroup(h)); left == nil {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if left != nil {
			return fmt.Errorf("remove the cgroup: %w", left)
		}
	}
	return nil
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if os.IsNotExist(err) {
			return nil
		}
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := syscall.Rmdir(dir); err != nil && err != syscall.ENOENT {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

// The main goroutine stays on the main thread, so that it is the one that becomes another program below. If another thread did, the
// main one would first have to end, and for a moment the process would look like a zombie to who asks whether it is alive.
func init() { runtime.LockOSThread() }

// enterCgroup moves this process into a node's cgroups and becomes the command. The cgroup namespace that the command makes then
// has the node's cgroup as its root.
func enterCgroup(name string, args []string) error {
	var number int
	if _, err := fmt.Sscanf(name, "node-%d", &number); err != nil {
		return fmt.Errorf("node %q: %w", name, err)
	}
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := os.WriteFile(filepath.Join(newNode(number).cgroup(h), "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("enter the cgroup: %w", err)
		}
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	return syscall.Exec(path, args, os.Environ())
}

// remountCgroups, run inside the node's namespaces, replaces what is mounted by the node's own view.
func remountCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := syscall.Unmount(h.Mount, syscall.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", h.Mount, err)
		}
		kind := "cgroup"
		if h.Version == 2 {
			kind = "cgroup2"
		}
		if err := syscall.Mount("cgroup", h.Mount, kind, syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, h.Options); err != nil {
			return fmt.Errorf("mount %s: %w", h.Mount, err)
		}
		if h.Version == 2 && !h.Hybrid {
			// No process may be in a cgroup that delegates: the node's own programs go into a child.
			init := filepath.Join(h.Mount, "init")
			if err := os.MkdirAll(init, 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(init, "cgroup.procs"), []byte("0"), 0o644); err != nil {
				return err
			}
			if err := delegate(h.Mount); err != nil {
				return err
			}
		}
	}
	return nil
}
