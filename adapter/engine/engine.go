// Package engine evaluates a rule's PromQL for the whole fleet: one function type, and a maker for each place where it
// can be evaluated.
//
// It judges no value: what is fit to be served is for rules.Decide to say.
package engine

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
)

// Point is one element of the vector that an expression gives.
type Point struct {
	Labels labels.Labels
	Value  float64 // may be NaN or infinite
}

// Func evaluates expr as an instant query at a time. An expression that gives no instant vector of floats is an error
// that names it. Safe for concurrent use; it returns when ctx is done.
type Func func(ctx context.Context, expr string, at time.Time) ([]Point, error)

// Config of the embedded engine.
type Config struct {
	Lookback   time.Duration                        // how old the sample that an instant selector gives may be, a rule's maxAge; 0 = 15 s
	Timeout    time.Duration                        // of one query; 0 = 2 s
	MaxSamples int                                  // in memory at once during one query; 0 = 50,000,000
	Annotated  func(expr string, warnings []string) // called with a query's warnings and infos, if it has any; nil = ignored
}

// Embedded evaluates with Prometheus' own engine over q. It starts nothing and keeps no query log. Rules with different
// maxAge need one each: an engine is a few words.
func Embedded(q storage.Queryable, cfg Config) Func {
	if cfg.Lookback <= 0 {
		cfg.Lookback = 15 * time.Second
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 2 * time.Second
	}
	if cfg.MaxSamples <= 0 {
		cfg.MaxSamples = 50_000_000
	}
	eng := promql.NewEngine(promql.EngineOpts{
		MaxSamples:       cfg.MaxSamples,
		Timeout:          cfg.Timeout,
		LookbackDelta:    cfg.Lookback,
		EnableAtModifier: true,
		Parser:           parser.NewParser(parser.Options{}),
	})
	return func(ctx context.Context, expr string, at time.Time) ([]Point, error) {
		query, err := eng.NewInstantQuery(ctx, q, nil, expr, at)
		if err != nil {
			return nil, fmt.Errorf("query %s: %w", expr, err)
		}
		defer query.Close()
		result := query.Exec(ctx)
		if cfg.Annotated != nil && len(result.Warnings) > 0 {
			warnings, infos := result.Warnings.AsStrings(expr, 10, 10)
			cfg.Annotated(expr, append(warnings, infos...))
		}
		if result.Err != nil {
			return nil, fmt.Errorf("query %s: %w", expr, result.Err)
		}
		vector, ok := result.Value.(promql.Vector)
		if !ok {
			return nil, fmt.Errorf("query %s: gives a %s, not an instant vector", expr, result.Value.Type())
		}
		points := make([]Point, len(vector))
		for i, v := range vector {
			if v.H != nil {
				return nil, fmt.Errorf("query %s: gives a histogram for %s, not a number", expr, v.Metric)
			}
			points[i] = Point{v.Metric, v.F}
		}
		return points, nil
	}
}
