package env

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/capstan-gpu/capstan/trainer/ring"
)

// The ports of generations. They are below those that Linux gives to outgoing connections.
const (
	DefaultFirstPort = 29500
	Ports            = terms * counts

	terms, counts = 8, 64
)

// Port is where the processes of a generation meet, and where TensorFlow's listen. None of the 63 generations before it in its term, and
// none of the seven terms before, has the same: what is left of one of those cannot come in, nor hold the port.
func Port(firstPort int, g ring.Generation) int {
	return firstPort + int(g.Term%terms)*counts + int(g.Count%counts)
}

func (p Process) port() int { return Port(p.FirstPort, p.Generation) }

// host is where the pod of a rank is.
func (p Process) host(rank int) string {
	if p.Hosts != nil {
		return p.Hosts[rank]
	}
	return p.name(p.StatefulSet, p.Service, p.Members[rank])
}

// name is what the headless Service calls a pod. Only a Service with publishNotReadyAddresses tells it before the pod is ready.
func (p Process) name(statefulSet, service string, ordinal int) string {
	name := fmt.Sprintf("%s-%d.%s.%s.svc", statefulSet, ordinal, service, p.Namespace)
	if p.ClusterDomain != "" {
		name += "." + p.ClusterDomain
	}
	return name
}

// address is a host with a port.
func address(host string, port int) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s:%d", host, port)
}

// isLabel says that s can be one part of a DNS name.
func isLabel(s string) bool {
	return len(s) >= 1 && len(s) <= 63 && only(s, "abcdefghijklmnopqrstuvwxyz0123456789-") && s[0] != '-' && s[len(s)-1] != '-'
}

// isName says that s can be a DNS name, or an IPv4 address.
func isName(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return false
		}
	}
	return len(s) <= 200
}

func isIP(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Zone() == ""
}

func only(s, characters string) bool { return strings.Trim(s, characters) == "" }
