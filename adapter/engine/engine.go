// Package engine evaluates a rule's PromQL for the whole fleet: one function type, and a maker for each place where it
// can be evaluated.
package engine

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/storage"
)

// Point is one element of the vector that an expression gives.
type Point struct {
	Labels labels.Labels
	Value  float64 // may be NaN or infinite: what is fit to be served is for rules.Decide to say
}

// Func evaluates expr as an instant query at a time.
type Func func(ctx context.Context, expr string, at time.Time) ([]Point, error)

// Config of the embedded engine.
type Config struct {
	Lookback   time.Duration                        // how old the sample that an instant selector gives may be; 0 = 15 s
	Timeout    time.Duration                        // of one query; 0 = 2 s
	MaxSamples int                                  // in memory at once during one query; 0 = 50,000,000
	Annotated  func(expr string, warnings []string) // called with a query's warnings and infos, if it has any; nil = ignored
}

// Embedded evaluates with Prometheus' own engine over q.
func Embedded(q storage.Queryable, cfg Config) Func {
	return func(context.Context, string, time.Time) ([]Point, error) { return nil, errors.New("not yet") }
}
