package podmap

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Whatever pod-resources says, only known pods hold devices, each device's replica belongs to its GPU, and a GPU that two pods
// hold is shared.
func FuzzPodResources(f *testing.F) {
	b, err := proto.Marshal(&podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Namespace: "a", Name: "web-0", Containers: []*podresources.ContainerResources{{Name: "c", Devices: []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1", "GPU-2::0"}}}}}},
		{Namespace: "a", Name: "web-1", Containers: []*podresources.ContainerResources{{Name: "c", Devices: []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1"}}}}}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var r podresources.ListPodResourcesResponse
		if proto.Unmarshal(b, &r) != nil {
			return
		}
		c := NewCore(time.Minute)
		c.Sync(epoch, []Pod{{Namespace: "a", Name: "web-0", UID: "u0"}, {Namespace: "a", Name: "web-1", UID: "u1"}, {Namespace: "a", Name: "twice", UID: "u2"}, {Namespace: "a", Name: "twice", UID: "u3"}})
		c.Ask(epoch)
		c.Answered(epoch, answerOf(&r))
		c.Ask(epoch)
		byUUID := map[string]Allocation{}
		for _, a := range c.Mapping(epoch).Allocations {
			if want := map[string]string{"web-0": "u0", "web-1": "u1"}[a.Pod]; a.Namespace != "a" || a.PodUID != want || want == "" {
				t.Fatalf("%+v is bound to the wrong pod", a)
			}
			if uuid, _ := uuidOf(a.DeviceID); uuid != a.UUID {
				t.Fatalf("%+v", a)
			}
			if o, ok := byUUID[a.UUID]; ok && (o.Shared != a.Shared || o.PodUID != a.PodUID && !a.Shared) {
				t.Fatalf("%+v and %+v", o, a)
			}
			byUUID[a.UUID] = a
		}
	})
}

// Whatever a plugin calls its devices, cutting the replica off is a prefix, and doing it twice changes nothing.
func FuzzDeviceID(f *testing.F) {
	for _, id := range []string{"GPU-8f6e9d0c-1111-2222-3333-444455556666::3", "GPU-8f6e9d0c-1111-2222-3333-444455556666-7", "nvidia0/gi3/vgpu2", "0::1", "::", "/vgpu"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		uuid, replica := uuidOf(id)
		if !strings.HasPrefix(id, uuid) || replica != (uuid != id) {
			t.Fatalf("%q is %q, replica %t", id, uuid, replica)
		}
	})
}
