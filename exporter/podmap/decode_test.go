package podmap

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/capstan-gpu/capstan/metricname"
)

// kept are the labels that are kept in these tests.
var kept = []string{"team", "none", "app.kubernetes.io/name"}

// twin is decodePod by the real type.
func twin(p *corev1.Pod) Pod {
	cut := func(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxText)], "") }
	var labels []string
	for i, key := range kept {
		if v, ok := p.Labels[key]; ok {
			if labels == nil {
				labels = make([]string, len(kept))
			}
			labels[i] = cut(v)
		}
	}
	return Pod{Labels: labels, Given: givenBy(cut(p.Annotations[AnnotationHAMi])), Namespace: cut(p.Namespace), Name: cut(p.Name), UID: cut(string(p.UID)), Phase: cut(string(p.Status.Phase)), IP: cut(p.Status.PodIP),
		HostNetwork: p.Spec.HostNetwork, Terminating: p.DeletionTimestamp != nil,
		StatsPort: cut(p.Annotations[metricname.AnnotationStatsPort]), StatsPath: cut(p.Annotations[metricname.AnnotationStatsPath])}
}

func samplePod() *corev1.Pod {
	now := metav1.NewTime(time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC))
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "web-0", UID: "u0", DeletionTimestamp: &now, Labels: map[string]string{"x": "y", "team": "vision", "app.kubernetes.io/name": "trainer"},
			Annotations:     map[string]string{metricname.AnnotationStatsPort: "9402", metricname.AnnotationStatsPath: "/metrics", AnnotationHAMi: "GPU-a,NVIDIA,3000,30:;", "other": strings.Repeat("z", 5000)},
			OwnerReferences: []metav1.OwnerReference{{Name: "web", UID: "no"}}},
		Spec: corev1.PodSpec{NodeName: "n", HostNetwork: true, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.7", HostIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.7"}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "c", Ready: true}}},
	}
}

func TestDecodePod(t *testing.T) {
	b, err := samplePod().Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodePod(b, kept)
	if err != nil {
		t.Fatal(err)
	}
	want := Pod{Namespace: "a", Name: "web-0", UID: "u0", Phase: "Running", IP: "10.0.0.7", HostNetwork: true, Terminating: true, StatsPort: "9402", StatsPath: "/metrics",
		Labels: []string{"vision", "", "trainer"}, Given: []string{"GPU-a"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(twin(samplePod()), got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range [][]byte{nil, {0x0a}, {0x0a, 0x05, 1}, []byte("hello")} {
		if p, err := decodePod(bad, kept); err == nil {
			t.Errorf("decodePod(%q) = %v, want an error", bad, p)
		}
	}
}

// What decodes here and as a real Pod decodes to the same; what decodes at all has a name, a UID and bounded text.
func FuzzDecodePod(f *testing.F) {
	b, err := samplePod().Marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{0x0a, 0x00})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decodePod(b, kept)
		if err != nil {
			return
		}
		if got.Name == "" || got.UID == "" {
			t.Fatalf("no identity: %+v", got)
		}
		for _, s := range []string{got.Name, got.Namespace, got.UID, got.Phase, got.IP, got.StatsPort, got.StatsPath} {
			if len(s) > maxText || !utf8.ValidString(s) {
				t.Fatalf("text %q", s)
			}
		}
		var p corev1.Pod
		if p.Unmarshal(b) != nil {
			return
		}
		// The real type takes a repeated message for a merge, as we do; re-encoding makes one form of it.
		canonical, err := p.Marshal()
		if err != nil {
			return
		}
		again, err := decodePod(canonical, kept)
		if err != nil {
			return // a name that the real type does not have, in a field of another wire type
		}
		if diff := cmp.Diff(twin(&p), again); diff != "" {
			t.Fatal(diff)
		}
	})
}
