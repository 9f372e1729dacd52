package hpa

import "time"

// Spec is the spec of a HorizontalPodAutoscaler, autoscaling/v2, as the API server stores it: minReplicas is 1 and the metric is CPU at
// 80 % where a manifest has none. The fields have the names that they have there; quantities are their MilliValue, tolerances their
// AsApproximateFloat64, seconds are durations.
type Spec struct {
	MinReplicas int32
	MaxReplicas int32
	Metrics     []Metric
	Behavior    *Behavior // nil where the manifest has none: other rules than those of an empty one
}

// Metric is one element of spec.metrics.
type Metric struct {
	Name   string // of the metric or the resource; for people, but "cpu" is treated as CPU is
	Source Source
	Target Target
}

// Source is a metric's type.
type Source string

const (
	External          Source = "External"
	Object            Source = "Object"
	Pods              Source = "Pods"
	Resource          Source = "Resource"
	ContainerResource Source = "ContainerResource"
)

// Target is a metric's target.
type Target struct {
	Type    TargetType
	Value   Milli // for Value and AverageValue; > 0
	Percent int32 // for Utilization: target.averageUtilization; > 0
}

// TargetType says what a target is compared with.
type TargetType string

const (
	Value        TargetType = "Value"        // the sum of the items; External and Object
	AverageValue TargetType = "AverageValue" // External and Object: the sum over status.replicas; else the mean of the pods
	Utilization  TargetType = "Utilization"  // percent of what the pods request; Resource and ContainerResource
)

// Milli is a number in thousandths, which is all that the HPA sees of a quantity: resource.Quantity.MilliValue, rounded up.
type Milli int64

// Behavior is spec.behavior. Its zero value is what the API server fills in: upwards by 4 pods or 100 % in 15 s, whichever is more,
// and without a window; downwards by 100 % in 15 s, with the window of the controller's flag.
type Behavior struct {
	ScaleUp, ScaleDown Rules
}

// Rules are the rules for one direction.
type Rules struct {
	StabilizationWindow *time.Duration // stabilizationWindowSeconds, in whole seconds; nil = the default
	SelectPolicy        SelectPolicy   // "" = MaxChange
	Policies            []Policy       // none = the default ones
	Tolerance           *float64       // a share; nil = that of the controller's flag
}

// SelectPolicy says which of several policies counts.
type SelectPolicy string

const (
	MaxChange SelectPolicy = "Max"
	MinChange SelectPolicy = "Min"
	Disabled  SelectPolicy = "Disabled" // no change in this direction
)

// Policy allows so much change in any interval of so many seconds.
type Policy struct {
	Type   PolicyType
	Value  int32
	Period time.Duration // periodSeconds, in whole seconds
}

// PolicyType is the unit of a policy's value.
type PolicyType string

const (
	PodsPolicy    PolicyType = "Pods"
	PercentPolicy PolicyType = "Percent" // of the size at the start of the period
)

// withDefaults fills in what the API server and, for the window downwards, the controller do.
func (b Behavior) withDefaults(c Controller) Behavior {
	up, down := time.Duration(0), c.DownscaleStabilization.Truncate(time.Second)
	return Behavior{
		ScaleUp:   b.ScaleUp.withDefaults(up, Policy{PodsPolicy, 4, 15 * time.Second}, Policy{PercentPolicy, 100, 15 * time.Second}),
		ScaleDown: b.ScaleDown.withDefaults(down, Policy{PercentPolicy, 100, 15 * time.Second}),
	}
}

func (r Rules) withDefaults(window time.Duration, policies ...Policy) Rules {
	if r.StabilizationWindow == nil {
		r.StabilizationWindow = &window
	}
	if r.SelectPolicy == "" {
		r.SelectPolicy = MaxChange
	}
	if len(r.Policies) == 0 {
		r.Policies = policies
	}
	return r
}

// fromZero says that a metric can be had without pods.
func (s Spec) fromZero() bool {
	for _, m := range s.Metrics {
		if m.Source == External || m.Source == Object {
			return true
		}
	}
	return false
}

// band is the interval of ratios that keep a size, both ends included.
type band struct{ low, high float64 }

func (b band) holds(ratio float64) bool { return b.low <= ratio && ratio <= b.high }

func (s Spec) tolerance(c Controller) band {
	up, down := c.Tolerance, c.Tolerance
	if s.Behavior != nil {
		if t := s.Behavior.ScaleUp.Tolerance; t != nil {
			up = *t
		}
		if t := s.Behavior.ScaleDown.Tolerance; t != nil {
			down = *t
		}
	}
	return band{1 - down, 1 + up}
}
