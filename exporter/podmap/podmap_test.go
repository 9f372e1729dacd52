package podmap

import (
	"reflect"
	"testing"
	"time"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Every plugin names the replicas of a shared device in its own way.
func TestReplicas(t *testing.T) {
	const uuid = "GPU-8f6e9d0c-1111-2222-3333-444455556666"
	for id, want := range map[string]string{
		uuid:                   uuid,
		uuid + "::3":           uuid + " shared",
		"MIG-" + uuid + "/7/0": "MIG-" + uuid + "/7/0",
		"MIG-8f6e9d0c-1111-2222-3333-444455556666::0": "MIG-8f6e9d0c-1111-2222-3333-444455556666 shared",
		"nvidia0":           "nvidia0",
		"nvidia0/gi3":       "nvidia0/gi3",
		"nvidia0/vgpu1":     "nvidia0 shared",
		"nvidia0/gi3/vgpu2": "nvidia0/gi3 shared",
		uuid + "-7":         uuid + " shared", // HAMi
		uuid + "-x":         uuid + "-x",
		uuid + "-":          uuid + "-",
		"0::1":              "0 shared",
		"GPU-short-1":       "GPU-short-1",
	} {
		got, replica := uuidOf(id)
		if replica {
			got += " shared"
		}
		if got != want {
			t.Errorf("%s is %s, want %s", id, got, want)
		}
	}
}

// A device of a claim (dynamic resource allocation) is held as one of a plugin; other drivers' devices are none of our business.
func TestClaims(t *testing.T) {
	claim := func(driver, device string) *podresources.DynamicResource {
		return &podresources.DynamicResource{ClaimName: "gpu", ClaimNamespace: "a", ClaimResources: []*podresources.ClaimResource{{DriverName: driver, PoolName: "node", DeviceName: device}}}
	}
	a := answerOf(&podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{Namespace: "a", Name: "web-0", Containers: []*podresources.ContainerResources{{
		Name: "c", DynamicResources: []*podresources.DynamicResource{claim("gpu.nvidia.com", "gpu-3"), claim("nic.example.com", "eth-0"), claim("gpu.nvidia.com", "")}}}}}})
	want := Answer{{Namespace: "a", Pod: "web-0", Container: "c", Resource: "gpu.nvidia.com", DeviceIDs: []string{"gpu-3"}}}
	if !reflect.DeepEqual(a, want) {
		t.Errorf("%+v, want %+v", a, want)
	}
	if !isGPU("gpu.nvidia.com", "gpu-3") {
		t.Error("a device of NVIDIA's driver is no GPU")
	}
}

// HAMi hands out numbers through the kubelet, and says in an annotation which GPUs they are. It is believed on request only.
func TestHAMi(t *testing.T) {
	pod := Pod{Namespace: "a", Name: "web-0", UID: "u0", Given: givenBy("GPU-a,NVIDIA,3000,30:GPU-b,NVIDIA,3000,30:;GPU-a,NVIDIA,1,1:;GPU-cut,NV")}
	if want := []string{"GPU-a", "GPU-b"}; !reflect.DeepEqual(pod.Given, want) {
		t.Fatalf("given %v, want %v", pod.Given, want)
	}
	answer := Answer{{Namespace: "a", Pod: "web-0", Container: "c", Resource: "nvidia.com/gpu", DeviceIDs: []string{"GPU-x-3", "GPU-x-4"}}}
	for hami, want := range map[bool][]string{false: {"GPU-x-3", "GPU-x-4"}, true: {"GPU-a", "GPU-b"}} {
		c := newCore(time.Minute, hami)
		c.Sync(epoch, []Pod{pod})
		c.Ask(epoch)
		c.Answered(epoch, answer)
		c.Ask(epoch)
		var got []string
		for _, a := range c.Mapping(epoch).Allocations {
			got = append(got, a.UUID)
			if a.Shared != hami || a.PodUID != "u0" {
				t.Errorf("%+v; want it shared: %t", a, hami)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("with HAMi %t: holds %v, want %v", hami, got, want)
		}
	}
	for _, text := range []string{"", ";", ":;", "GPU-a", "GPU-a,NVIDIA:;", "x,NVIDIA,1,1:;", ",,,:;"} {
		if got := givenBy(text); got != nil {
			t.Errorf("%q gives %v", text, got)
		}
	}
}
