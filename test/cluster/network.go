package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// node is one machine of the cluster. Its addresses follow from its number, 1 and up; node-1 has the control plane and is the hub
// to which the others are connected by one veth pair each.
type node struct {
	Number  int
	Name    string
	IP      string // its address
	Gateway string // the hub's address on the link to it
	Pods    string // the range of its pods
}

func newNode(number int) node {
	n := node{
		Number:  number,
		Name:    fmt.Sprintf("node-%d", number),
		IP:      fmt.Sprintf("10.88.%d.2", number-1),
		Gateway: fmt.Sprintf("10.88.%d.1", number-1),
		Pods:    fmt.Sprintf("10.244.%d.0/24", number-1),
	}
	return n
}

// netns is the name of the node's network namespace.
func (n node) netns() string { return "capstan-" + n.Name }

const (
	podRange     = "10.244.0.0/16"
	serviceRange = "10.96.0.0/16"
)

func serviceIP(last int) string { return fmt.Sprintf("10.96.0.%d", last) }

// inNet runs a program in a node's network namespace. Not by "ip netns exec": that mounts a fresh /sys, which hides the cgroups.
func (n node) inNet(args ...string) []string {
	return append([]string{"nsenter", "--net=/run/netns/" + n.netns()}, args...)
}

// connect makes the node's network namespace and its link to the hub. There is no dummy device in every kernel: a veth pair inside
// the namespace serves as the hub's eth0.
func (n node) connect() error {
	if _, err := os.Stat("/run/netns/" + n.netns()); err == nil {
		return nil
	}
	hub := newNode(1)
	ip := func(text string) []string { return append([]string{"ip"}, strings.Fields(text)...) }
	commands := [][]string{
		ip("netns add " + n.netns()),
		ip("-n " + n.netns() + " link set lo up"),
	}
	if n.Number == 1 {
		commands = append(commands,
			ip("-n "+n.netns()+" link add eth0 type veth peer name eth0p"),
			ip("-n "+n.netns()+" link set eth0p up"))
	} else {
		link := fmt.Sprintf("n%d", n.Number)
		commands = append(commands,
			ip("-n "+hub.netns()+" link add "+link+" type veth peer name eth0 netns "+n.netns()),
			ip("-n "+hub.netns()+" addr add "+n.Gateway+"/24 dev "+link),
			ip("-n "+hub.netns()+" link set "+link+" up"),
			ip("-n "+hub.netns()+" route add "+n.Pods+" via "+n.IP))
	}
	commands = append(commands,
		ip("-n "+n.netns()+" addr add "+n.IP+"/24 dev eth0"),
		ip("-n "+n.netns()+" link set eth0 up"),
		ip("-n "+n.netns()+" route add default via "+n.Gateway+" dev eth0"),
		n.inNet("sysctl", "-qw", "net.ipv4.ip_forward=1"))
	for _, c := range commands {
		if err := run(c...); err != nil {
			return err
		}
	}
	return nil
}

// disconnect removes the node's network namespace, and with it every address, route, rule and device that was made in it.
func (n node) disconnect() error {
	if _, err := os.Stat("/run/netns/" + n.netns()); err != nil {
		return nil
	}
	return run("ip", "netns", "del", n.netns())
}

// run runs a program to its end; its output is in the error.
func run(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if path, err := exec.LookPath(args[0]); err != nil {
		for _, dir := range []string{"/usr/sbin/", "/sbin/"} {
			if _, err := os.Stat(dir + args[0]); err == nil {
				cmd = exec.Command(dir+args[0], args[1:]...)
				break
			}
		}
	} else {
		cmd.Path = path
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
