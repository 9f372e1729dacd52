package board

import "github.com/capstan-gpu/capstan/metricname"

// The pods of a workload are known by their names: a StatefulSet's pods are its name and an ordinal.
const (
	ofPods = `{namespace="$namespace", pod=~"$workload-[0-9]+"}`
	ofJob  = `{metric="gpu_utilization", namespace="$namespace", workload="$workload"}`
	ofSet  = `{namespace="$namespace", statefulset="$workload"}`
	busy   = "rate(" + metricname.PodGPUBusySeconds + ofPods + "[$__rate_interval])"
	seen   = "rate(" + metricname.PodGPUObservedSeconds + ofPods + "[$__rate_interval])"
)

// Names of the adapter's own metrics and of kube-state-metrics that the dashboard and the alerts use.
const (
	AdapterSignal = "capstan_adapter_workload_signal"
	AdapterPods   = "capstan_adapter_workload_pods"
	AdapterAge    = "capstan_adapter_workload_sample_age_seconds"
	HPADesired    = "kube_horizontalpodautoscaler_status_desired_replicas"
	HPACurrent    = "kube_horizontalpodautoscaler_status_current_replicas"
	SetReplicas   = "kube_statefulset_replicas"
	SetReady      = "kube_statefulset_status_replicas_ready"
)

// Target is the utilization, in percent, that the examples' HPAs keep; Tolerance is the HPA's own, above which it acts.
const (
	Target    = 80
	Tolerance = 1.1
)

// StarvedAge is the age of a workload's newest sample, in seconds, at which something is wrong: four scrapes.
const StarvedAge = 20

var trainingJob = Board{
	UID:         "capstan-training-job",
	Title:       "Capstan / Training job",
	Description: "One elastic training job: how busy its workers are, what the HPA reads of it, and what the HPA does.",
	Variables: []Variable{
		{"namespace", "Namespace", "label_values(" + metricname.PodGPUs + ", namespace)"},
		{"workload", "Workload", `label_values(` + AdapterSignal + `{namespace="$namespace"}, workload)`},
	},
	Rows: []Row{
		{"Now", []Panel{
			{Title: "Signal", Description: "1 while the HPA gets values, 0 while it gets an error. With 0, look at the HPA's conditions: they say which worker is missing.", Unit: "short", Stat: true, Width: 4, Min: at(0), Max: at(1), Low: true, Bad: at(1),
				Queries: []Query{{"min(" + AdapterSignal + ofJob + ")", "signal"}}},
			{Title: "Workers that report", Description: "Workers with a value, of those that are Ready and hold a GPU. Fewer than that means that an exporter, or its node, does not answer.", Unit: "percentunit", Stat: true, Width: 5, Min: at(0), Max: at(1), Low: true, Bad: at(1),
				Queries: []Query{{"min(" + AdapterPods + `{metric="gpu_utilization", namespace="$namespace", workload="$workload", state="reporting"}) / min(` + AdapterPods + `{metric="gpu_utilization", namespace="$namespace", workload="$workload", state="ready"} > 0)`, "reporting"}}},
			{Title: "Utilization", Description: "Mean over the workers of the busy share of their GPUs. The HPA adds workers above the target plus its tolerance of 10 %.", Unit: "percent", Stat: true, Width: 5, Min: at(0), Max: at(100), Warn: at(Target * Tolerance),
				Queries: []Query{{"100 * sum(" + busy + ") / sum(" + seen + ")", "mean"}}},
			{Title: "Samples", Description: "Samples per second over all workers: the work that the job gets done.", Unit: "ops", Stat: true, Width: 5, Min: at(0),
				Queries: []Query{{"sum(rate(" + metricname.Prefix + "training_samples_total" + ofPods + "[$__rate_interval]))", "samples"}}},
			{Title: "Age of the newest sample", Description: "How old the newest of the job's samples is. It grows while nobody can be asked; above four scrapes look at the exporters.", Unit: "s", Stat: true, Width: 5, Min: at(0), Bad: at(StarvedAge),
				Queries: []Query{{"max(" + AdapterAge + ofJob + ")", "age"}}},
		}},
		{"Who drives the HPA", []Panel{
			{Title: "Utilization of each worker", Description: "Busy over observed, per worker; the mean of its own GPUs. The dashed line is the target plus the HPA's tolerance. A gap is a value that is not known.", Unit: "percent", Width: 12, Min: at(0), Max: at(100), Warn: at(Target * Tolerance),
				Queries: []Query{{"100 * sum by (pod) (" + busy + ") / sum by (pod) (" + seen + ")", "{{pod}}"}}},
			{Title: "What the HPA asks for", Description: "Replicas that the HPA asks for and has, and those that are Ready. Needs kube-state-metrics. Asked for and not Ready: look for Pending pods, which wait for GPUs.", Unit: "short", Width: 12, Min: at(0), Steps: true,
				Queries: []Query{
					{"max(" + HPADesired + `{namespace="$namespace"} and on (namespace, horizontalpodautoscaler) kube_horizontalpodautoscaler_info{namespace="$namespace", scaletargetref_name="$workload"})`, "desired"},
					{"max(" + SetReplicas + ofSet + ")", "replicas"},
					{"max(" + SetReady + ofSet + ")", "ready"},
				}},
		}},
		{"Is the signal whole", []Panel{
			{Title: "Workers by what they report", Description: "Ready: Ready with a GPU. Reporting: with a value of now. Held: an older value stands in for it. All three fall and rise together when the job is resized.", Unit: "short", Width: 12, Min: at(0), Steps: true,
				Queries: []Query{{"max by (state) (" + AdapterPods + ofJob + ")", "{{state}}"}}},
			{Title: "GPUs of each worker", Description: "GPUs that each worker holds. A worker of a job that holds more or fewer than the others is a mistake in its manifest, or a GPU that was lost.", Unit: "short", Width: 12, Min: at(0), Steps: true,
				Queries: []Query{{"max by (pod) (" + metricname.PodGPUs + ofPods + ")", "{{pod}}"}}},
		}},
		{"What the job gets done", []Panel{
			{Title: "Samples of each worker", Description: "Samples per second of each worker. One that lags behind holds up a synchronous ring.", Unit: "ops", Width: 12, Min: at(0),
				Queries: []Query{{"sum by (pod) (rate(" + metricname.Prefix + "training_samples_total" + ofPods + "[$__rate_interval]))", "{{pod}}"}}},
			{Title: "GPU memory of each worker", Description: "Memory used on the worker's GPUs, without what the driver reserves. It says nothing about load.", Unit: "bytes", Width: 12, Min: at(0),
				Queries: []Query{{"sum by (pod) (" + metricname.PodGPUMemoryUsed + ofPods + ")", "{{pod}}"}}},
		}},
	},
}
