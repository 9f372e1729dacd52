package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/capstan-gpu/capstan/metricname"
)

// page renders what one node's exporter shows: the families that an exporter has, for 8 GPUs and 10 pods.
type page struct {
	parts []string // of the page, between counters
	share []float64
}

var epoch = time.Now().Add(-time.Hour)

// pod is the j-th pod of a node.
type pod struct{ namespace, set, name, uid, node string }

func podOf(node, j int) pod {
	n := node + j*nodes // so that a set's pods are on several nodes
	set := n / podsPerSet
	return pod{
		namespace: namespaceOf(set), set: setName(set), node: nodeName(node),
		name: fmt.Sprintf("%s-%d", setName(set), n%podsPerSet), uid: fmt.Sprintf("6f1c0000-0000-4000-8000-%012d", n),
	}
}

func nodeName(i int) string      { return fmt.Sprintf("gpu-node-%04d.example.internal", i) }
func setName(i int) string       { return fmt.Sprintf("training-%04d-worker", i) }
func namespaceOf(set int) string { return fmt.Sprintf("team-%02d", set%namespaces) }

func newPage(node int) *page {
	p := &page{}
	var b strings.Builder
	counter := func(share float64) { // ends a part: the counter's value follows
		p.parts = append(p.parts, b.String())
		p.share = append(p.share, share)
		b.Reset()
		b.WriteByte('\n')
	}
	family := func(name, kind string) {
		fmt.Fprintf(&b, "# HELP %s A line of help as long as such a line usually is, more or less.\n# TYPE %s %s\n", name, name, kind)
	}
	uuid := func(g int) string { return fmt.Sprintf("GPU-%08d-0000-4000-8000-%012d", node, g) }

	family(metricname.SnapshotTimestamp, "gauge")
	b.WriteString(metricname.SnapshotTimestamp + " ")
	counter(-1)
	b.WriteString("process_start_time_seconds 1.7e+09\n")
	family(metricname.GPUInfo, "gauge")
	for g := range gpusPerNode {
		fmt.Fprintf(&b, "%s{driver_version=\"590.48.01\",index=\"%d\",minor=\"%d\",model=\"NVIDIA H200\",pci_bus_id=\"00000000:%02X:00.0\",utilization_source=\"samples\",uuid=%q} 1\n", metricname.GPUInfo, g, g, g, uuid(g))
	}
	for _, name := range []string{metricname.GPUBusySeconds, metricname.GPUObservedSeconds, metricname.GPUEnergy} {
		family(name, "counter")
		for g := range gpusPerNode {
			fmt.Fprintf(&b, "%s{uuid=%q} ", name, uuid(g))
			counter(.9)
		}
	}
	for _, name := range []string{metricname.GPUUp, metricname.GPUUtilizationRatio, metricname.GPUMemoryUsed, metricname.GPUMemoryReserved, metricname.GPUMemoryTotal, metricname.GPUPower, metricname.GPUTemperature} {
		family(name, "gauge")
		for g := range gpusPerNode {
			fmt.Fprintf(&b, "%s{uuid=%q} 1.51397597184e+11\n", name, uuid(g))
		}
	}
	family(metricname.GPUClock, "gauge")
	for g := range gpusPerNode {
		for _, c := range []string{"memory", "sm"} {
			fmt.Fprintf(&b, "%s{clock=%q,uuid=%q} 1.98e+09\n", metricname.GPUClock, c, uuid(g))
		}
	}
	labels := func(j int, more string) string {
		o := podOf(node, j)
		return fmt.Sprintf("{namespace=%q,pod=%q,pod_uid=%q%s}", o.namespace, o.name, o.uid, more)
	}
	family(metricname.GPUAllocationInfo, "gauge")
	for j := range podsPerNode {
		fmt.Fprintf(&b, "%s%s 1\n", metricname.GPUAllocationInfo, labels(j, fmt.Sprintf(",container=\"worker\",resource=\"nvidia.com/gpu\",shared=\"false\",uuid=%q", uuid(j%gpusPerNode))))
	}
	for _, name := range []string{metricname.PodGPUBusySeconds, metricname.PodGPUObservedSeconds} {
		family(name, "counter")
		for j := range podsPerNode {
			fmt.Fprintf(&b, "%s%s ", name, labels(j, `,shared="false"`))
			share := 1.0
			if name == metricname.PodGPUBusySeconds {
				share = .5 + .04*float64(j)
			}
			counter(share)
		}
	}
	family(metricname.PodGPUs, "gauge")
	family(metricname.PodGPUMemoryUsed, "gauge")
	for j := range podsPerNode {
		fmt.Fprintf(&b, "%s%s 1\n", metricname.PodGPUs, labels(j, ""))
		fmt.Fprintf(&b, "%s%s 7.516192768e+10\n", metricname.PodGPUMemoryUsed, labels(j, `,shared="false"`))
	}
	for _, name := range []string{"steps_total", "samples_total", "lost_steps_total"} {
		family(metricname.Training+name, "counter")
		for j := range podsPerNode {
			fmt.Fprintf(&b, "%s%s ", metricname.Training+name, labels(j, ""))
			counter(10)
		}
	}
	for _, name := range []string{"world_size", "rank", "ring_generation", "ring_generation_age_seconds"} {
		family(metricname.Training+name, "gauge")
		for j := range podsPerNode {
			fmt.Fprintf(&b, "%s%s 8\n", metricname.Training+name, labels(j, ""))
		}
	}
	p.parts = append(p.parts, b.String())
	return p
}

func (p *page) render(now time.Time) string {
	var b strings.Builder
	elapsed := now.Sub(epoch).Seconds()
	for i, part := range p.parts {
		b.WriteString(part)
		if i == len(p.share) {
			break
		}
		if p.share[i] < 0 {
			fmt.Fprintf(&b, "%.3f", float64(now.UnixMilli())/1000)
		} else {
			fmt.Fprintf(&b, "%.3f", p.share[i]*elapsed)
		}
	}
	return b.String()
}
