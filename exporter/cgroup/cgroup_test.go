package cgroup

import (
	"os"
	"regexp"
	"testing"
)

const (
	uid   = "8f6e9d0c-1111-2222-3333-444455556666"
	under = "8f6e9d0c_1111_2222_3333_444455556666"
	other = "00000000-1111-2222-3333-444455556666"
)

func TestPodUID(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"version 2, systemd, containerd":   {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-abc.scope\n", uid},
		"version 2, systemd, cri-o":        {"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + under + ".slice/crio-abc.scope/container\n", uid},
		"version 2, guaranteed":            {"0::/kubepods.slice/kubepods-pod" + under + ".slice/cri-containerd-abc.scope\n", uid},
		"version 2, cgroupfs":              {"0::/kubepods/burstable/pod" + uid + "/abc\n", uid},
		"version 1, all hierarchies agree": {"12:memory:/kubepods/pod" + uid + "/abc\n3:cpu,cpuacct:/kubepods/pod" + uid + "/abc\n1:name=systemd:/\n", uid},
		"version 1, they do not":           {"12:memory:/kubepods/pod" + uid + "/abc\n3:cpu:/kubepods/pod" + other + "/abc\n", ""},
		"a node inside a pod":              {"0::/kubepods/pod" + other + "/xyz/kubepods/burstable/pod" + uid + "/abc\n", uid},
		"a static pod":                     {"0::/kubepods/pod0123456789abcdef0123456789abcdef/abc\n", "0123456789abcdef0123456789abcdef"},
		"a process of the host":            {"0::/system.slice/sshd.service\n", ""},
		"a name that only looks so":        {"0::/podman/tripod" + uid + "/abc\n", ""},
		"nothing":                          {"", ""},
		"no such format":                   {"garbage\n::::\n", ""},
	} {
		if got := PodUID(c.text); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestOfAProcessThatIsGone(t *testing.T) {
	if got := Of(1 << 31); got != "" {
		t.Errorf("%q", got)
	}
	_ = Of(uint32(os.Getpid())) // whatever it is, it is no panic
}

// Whatever a file says, what comes out is a UID or nothing.
func FuzzPodUID(f *testing.F) {
	f.Add("0::/kubepods/pod" + uid + "/abc\n")
	f.Add("12:memory:/kubepods-pod" + under + ".slice\n1:x:/")
	valid := regexp.MustCompile(`^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32})?$`)
	f.Fuzz(func(t *testing.T, text string) {
		if got := PodUID(text); !valid.MatchString(got) {
			t.Fatalf("%q of %q", got, text)
		}
	})
}
