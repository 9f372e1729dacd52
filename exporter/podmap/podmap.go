// Package podmap says which pod, by UID, holds which GPU of this node, and which pods live here.
//
// It asks the kubelet only, never the API server: pod-resources v1 knows device and pod name but no UID, the Pods API
// (v1alpha1, on by default from Kubernetes 1.37) knows the UIDs. [Core] is the decision, pure; [Run] is the thin driver
// around it. The package refuses to guess: a device whose pod has no certain UID is held by nobody, and a device id that it
// cannot read is handed on as it is, for others to count.
package podmap

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// Mapping is what is known about the pods of this node at one moment. Immutable.
type Mapping struct {
	At          time.Time    // of the pod-resources answer that Allocations rest on; zero = there is none that may still be used
	Allocations []Allocation // sorted by UUID, namespace, pod, UID, container, resource, device id
	Pods        []Pod        // live pods, sorted by namespace, name, UID; empty while the Pods API has not answered
	Unbound     []string     // namespace/name of pods that hold devices and have no certain UID, sorted

	Resources API               // pod-resources: who holds what
	PodsAPI   API               // Pods API: which UIDs live
	Errors    map[string]uint64 // unusable answers so far, by reason; see the Reason constants
}

// API is the health of one of the kubelet's interfaces.
type API struct {
	Up       bool
	Problem  string    // in words, with the fix; "" when Up
	Answered time.Time // newest good answer; zero = none
}

// Allocation is one device in the hands of one container.
type Allocation struct {
	DeviceID  string // as the kubelet says it: GPU-uuid, GPU-uuid::3, nvidia0/gi3, or anything else
	UUID      string // DeviceID without its replica: a UUID, or another name; which GPU that is, is not for this package to say
	Namespace string
	Pod       string
	PodUID    string
	Container string
	Resource  string // nvidia.com/gpu
	Shared    bool   // the device is handed out in replicas, or at least two pods hold it
}

// Pod is what the exporter needs to know of a live pod.
type Pod struct {
	Namespace, Name, UID string
	Phase                string // Pending, Running, Unknown: pods that ended are not live
	IP                   string // of the pod's own network; "" = none yet
	HostNetwork          bool
	Terminating          bool
	StatsPort, StatsPath string   // the annotations, unchecked
	Given                []string // UUIDs that HAMi says it gave the pod (see AnnotationHAMi), unchecked
	Labels               []string // values of Config.Labels, in their order; "" = the pod has no such label; nil = it has none of them
}

// AnnotationHAMi is where HAMi's scheduler writes which GPUs a pod really gets, like "GPU-…,NVIDIA,3000,30:;": what it hands out through
// the kubelet are mere numbers. It is believed on request only ([Config].HAMi): where HAMi does not rule, anybody could write there what
// they like, and have another's GPU counted as theirs.
const AnnotationHAMi = "hami.io/vgpu-devices-allocated"

// givenBy reads the annotation: devices end with ":", containers with ";", a device's fields are its UUID, kind, memory and cores.
func givenBy(annotation string) (uuids []string) {
	for _, device := range strings.FieldsFunc(annotation, func(r rune) bool { return r == ':' || r == ';' }) {
		uuid, rest, complete := strings.Cut(device, ",")
		if complete && strings.Count(rest, ",") >= 2 && (strings.HasPrefix(uuid, "GPU-") || strings.HasPrefix(uuid, "MIG-")) && !slices.Contains(uuids, uuid) && len(uuids) < maxGiven {
			uuids = append(uuids, uuid)
		}
	}
	return uuids
}

const maxGiven = 64

// live says whether the pod may hold devices: a pod that ended does not, one that is being deleted still does.
func (p Pod) live() bool { return p.Phase != "Succeeded" && p.Phase != "Failed" }

// Answer is one answer of pod-resources.
type Answer []Holder

// Holder is one container's devices of one resource.
type Holder struct {
	Namespace, Pod, Container, Resource string
	DeviceIDs                           []string
}

// Reasons of unusable answers, as counted in [Mapping.Errors].
const (
	ReasonUnreachable = "unreachable"  // nobody listens, or the connection broke
	ReasonTimeout     = "timeout"      // no answer in time
	ReasonRateLimited = "rate_limited" // the kubelet serves 100 calls a second to all its clients together
	ReasonNotReady    = "not_ready"    // the kubelet has not seen all its pods yet
	ReasonAbsent      = "absent"       // this kubelet does not serve the interface
	ReasonInvalid     = "invalid"      // an answer that is none
	ReasonAmbiguous   = "ambiguous"    // two live pods of one name, or the UID changed around the call: bound to neither
)

// uuidOf cuts the replica off a device id: "::N" of NVIDIA's plugin (time-slicing and MPS), "/vgpuN" of GKE's, "-N" after a whole UUID
// of HAMi's and Volcano's.
func uuidOf(id string) (uuid string, replica bool) {
	if uuid, _, replica = strings.Cut(id, "::"); replica {
		return uuid, true
	}
	if uuid, _, replica = strings.Cut(id, "/vgpu"); replica {
		return uuid, true
	}
	const length = len("GPU-00000000-0000-0000-0000-000000000000")
	if len(id) > length+1 && id[length] == '-' && (strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-")) && strings.Trim(id[length+1:], "0123456789") == "" {
		return id[:length], true
	}
	return id, false
}

// isGPU says whether a device may be one of ours: other vendors' plugins and NVIDIA's network devices are none of our business.
func isGPU(resource, id string) bool {
	return strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-") || strings.HasPrefix(resource, "nvidia.com/") || resource == driverDRA
}

// driverDRA is the name of NVIDIA's driver for dynamic resource allocation. Its devices are named gpu-MINOR.
const driverDRA = "gpu.nvidia.com"

func compareAllocations(a, b Allocation) int {
	return cmp.Or(cmp.Compare(a.UUID, b.UUID), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.PodUID, b.PodUID),
		cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.DeviceID, b.DeviceID))
}

func comparePods(a, b Pod) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
}

// markShared fills Shared: where an id names a replica, or two pods hold one device. It sorts all in place and drops repetitions.
func markShared(all []Allocation) []Allocation {
	slices.SortFunc(all, compareAllocations)
	all = slices.Compact(all)
	for from := 0; from < len(all); {
		to, shared := from, false
		for ; to < len(all) && all[to].UUID == all[from].UUID; to++ {
			_, replica := uuidOf(all[to].DeviceID)
			shared = shared || replica || all[to].PodUID != all[from].PodUID
		}
		for ; from < to; from++ {
			all[from].Shared = shared
		}
	}
	return all
}
