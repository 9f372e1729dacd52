package trainer

import (
	"net/netip"
	"strings"
	"testing"
)

func TestTargetOf(t *testing.T) {
	ok := func(p Pod, want string) {
		t.Helper()
		got, err := targetOf(p, false)
		if err != nil || "http://"+got.address.String()+got.path != want {
			t.Errorf("targetOf(%+v) = %v%s, %v; want %s", p, got.address, got.path, err, want)
		}
	}
	no := func(p Pod, word string) {
		t.Helper()
		if got, err := targetOf(p, false); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("targetOf(%+v) = %v, %v; want an error with %q", p, got, err, word)
		}
	}
	ok(Pod{IP: "10.0.0.7", Port: "9402"}, "http://10.0.0.7:9402/metrics")
	ok(Pod{IP: "fd00::7", Port: "1024", Path: "/a/b-c_d.e"}, "http://[fd00::7]:1024/a/b-c_d.e")
	ok(Pod{IP: "10.0.0.7", Port: "65535", Path: "/"}, "http://10.0.0.7:65535/")

	no(Pod{IP: "10.0.0.7", Port: "9402", HostNetwork: true}, "host's network")
	for _, ip := range []string{"", "localhost", "127.0.0.1", "169.254.169.254", "::1", "fe80::1", "fe80::1%eth0", "fd00::1%eth0", "::ffff:10.0.0.7", "0.0.0.0", "224.0.0.1", "10.0.0.7:80", "10.0.0.07"} {
		no(Pod{IP: ip, Port: "9402"}, "not a pod's")
	}
	for _, port := range []string{"0", "80", "1023", "65536", "-1", "+9402", "09402", " 9402", "9402 ", "9402/x", "9402@evil", "http", "0x2000", "99999999999999999999"} {
		no(Pod{IP: "10.0.0.7", Port: port}, "stats port")
	}
	no(Pod{IP: "10.0.0.7", Port: "10250"}, "kubelet's")
	for _, path := range []string{"metrics", "//evil/x", "/a//b", "/../x", "/x?y=1", "/x#y", "/%2e", "/x y", "/x\n", "/" + strings.Repeat("a", 64), "@evil", "http://evil/"} {
		no(Pod{IP: "10.0.0.7", Port: "9402", Path: path}, "stats path")
	}
}

func TestTargetsOf(t *testing.T) {
	targets, bad := targetsOf([]Pod{
		{UID: "good", IP: "10.0.0.1", Port: "9402"},
		{UID: "no page", IP: "10.0.0.2"},
		{UID: "host", IP: "10.0.0.3", Port: "9402", HostNetwork: true},
		{UID: "no address yet", Port: "9402"},
		{UID: "twin", IP: "10.0.0.4", Port: "9402"}, // two pods with one address: whose page would it be?
		{UID: "other twin", IP: "10.0.0.4"},
	}, false)
	if len(targets) != 1 || targets[0].uid != "good" {
		t.Errorf("targets %v, want only good", targets)
	}
	if len(bad) != 2 || bad["host"] != ReasonTarget || bad["twin"] != ReasonMoved {
		t.Errorf("bad %v", bad)
	}
}

// RDMA may need the host's network. Where that is allowed, each such pod has the port that it alone claims.
func TestHostNetwork(t *testing.T) {
	targets, bad := targetsOf([]Pod{
		{UID: "a", IP: "192.168.0.1", Port: "9402", HostNetwork: true},
		{UID: "b", IP: "192.168.0.1", Port: "9403", HostNetwork: true},
		{UID: "c", IP: "192.168.0.1", Port: "9404", HostNetwork: true},
		{UID: "d", IP: "192.168.0.1", Port: "9404", HostNetwork: true},
		{UID: "kubelet", IP: "192.168.0.1", Port: "10250", HostNetwork: true},
		{UID: "no page", IP: "192.168.0.1", HostNetwork: true},
	}, true)
	if len(targets) != 2 || targets[0].uid != "a" || targets[1].uid != "b" {
		t.Errorf("targets %v, want a and b", targets)
	}
	if len(bad) != 3 || bad["c"] != ReasonMoved || bad["d"] != ReasonMoved || bad["kubelet"] != ReasonTarget {
		t.Errorf("bad %v", bad)
	}
}

// Whatever the annotations say, a target is the pod's own address, a port that is no system's, and a plain path.
func FuzzAnnotationTarget(f *testing.F) {
	f.Add("10.0.0.7", "9402", "/metrics")
	f.Add("::ffff:10.0.0.7", "10250", "/../x")
	f.Fuzz(func(t *testing.T, ip, port, path string) {
		got, err := targetOf(Pod{IP: ip, Port: port, Path: path}, false)
		if err != nil {
			return
		}
		if got.address.Addr() != netip.MustParseAddr(ip) || got.address.Addr().IsLoopback() || got.address.Addr().IsLinkLocalUnicast() {
			t.Fatalf("address %v of %q", got.address, ip)
		}
		if got.address.Port() < 1024 || !strings.HasPrefix(got.path, "/") || len(got.path) > 64 || strings.ContainsAny(got.path, "?#@:%\\ \r\n") {
			t.Fatalf("target %v%s of %q %q", got.address, got.path, port, path)
		}
	})
}
