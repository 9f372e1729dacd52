package trainer

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/capstan-gpu/capstan/trainer/stats"
)

// target is a page that may be read. Comparable.
type target struct {
	namespace, pod, uid string
	address             netip.AddrPort
	path                string
}

// targetsOf lists the pages that may be read, and why others may not, by UID. Pods without a page are in neither. Pods in the host's
// network share the node's address: if they are allowed at all, a port that two of them claim is nobody's.
func targetsOf(pods []Pod, hostNetwork bool) (targets []target, bad map[string]string) {
	owners := map[string]int{} // by address, in the host's network by address and port
	owner := func(p Pod) string {
		if p.HostNetwork {
			return p.IP + " " + p.Port
		}
		return p.IP
	}
	for _, p := range pods {
		owners[owner(p)]++
	}
	bad = map[string]string{}
	for _, p := range pods {
		if p.Port == "" {
			continue
		}
		t, err := targetOf(p, hostNetwork)
		switch {
		case err == nil && owners[owner(p)] > 1:
			bad[p.UID] = ReasonMoved
		case err == nil:
			targets = append(targets, t)
		case p.IP != "" || p.HostNetwork: // else it has no network yet
			bad[p.UID] = ReasonTarget
		}
	}
	return targets, bad
}

// targetOf checks what a pod's annotations ask for. Pure.
func targetOf(p Pod, hostNetwork bool) (target, error) {
	if p.HostNetwork && !hostNetwork {
		return target{}, fmt.Errorf("pod %s/%s is on the host's network: its address is the node's (--host-network-trainers allows it)", p.Namespace, p.Name)
	}
	// No zone, no IPv4 dressed as IPv6, nothing that a node has beside its pods.
	ip, err := netip.ParseAddr(p.IP)
	if err != nil || ip.Zone() != "" || ip.Is4In6() || !ip.IsGlobalUnicast() {
		return target{}, fmt.Errorf("pod %s/%s has address %q: not a pod's", p.Namespace, p.Name, p.IP)
	}
	port, err := strconv.ParseUint(p.Port, 10, 16)
	if err != nil || port < stats.MinPort || strconv.FormatUint(port, 10) != p.Port {
		return target{}, fmt.Errorf("pod %s/%s asks for stats port %q: want 1024 to 65535", p.Namespace, p.Name, p.Port)
	}
	if port == 10250 || port == 10255 { // the kubelet's, whoever's address this may turn out to be
		return target{}, fmt.Errorf("pod %s/%s asks for stats port %d: that is the kubelet's", p.Namespace, p.Name, port)
	}
	path := p.Path
	if path == "" {
		path = stats.Path
	}
	if !plainPath(path) {
		return target{}, fmt.Errorf("pod %s/%s asks for stats path %q: want / and at most 63 of A-Z a-z 0-9 . _ - /", p.Namespace, p.Name, path)
	}
	return target{namespace: p.Namespace, pod: p.Name, uid: p.UID, address: netip.AddrPortFrom(ip, uint16(port)), path: path}, nil
}

func plainPath(path string) bool {
	if !strings.HasPrefix(path, "/") || len(path) > stats.MaxPathBytes || strings.Contains(path, "//") || strings.Contains(path, "..") {
		return false
	}
	for _, c := range []byte(path) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '/', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}
