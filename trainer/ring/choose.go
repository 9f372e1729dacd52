package ring

import (
	"fmt"
	"slices"
)

// promise is what one who has stopped says of itself.
type promise struct {
	id       ID
	position Position
	entered  Generation
	leaving  bool
	fresh    bool // it has read the newest checkpoint that there is
}

// choose says whose state the generation after rec begins with, or why there can be none yet. It is the heart of the ring's safety:
//
//   - One member of rec must have promised, or all must be gone; then rec steps no more, whatever the others do. This also fences: two
//     sides of a split cannot both follow rec, for only one can record a follower.
//   - The newest state of rec that is at hand counts. A step needs all members, so whoever is not at hand is at most one step ahead.
//   - If none at hand has a state of rec, and one of its members says that it never had one, then rec never stepped, and the state that
//     rec was to begin with is as good.
//   - Else the state is lost only if each member of rec is gone or here without it; then a checkpoint counts. Otherwise wait.
//
// At least half of rec's members who neither left nor are gone must have promised, so that the larger side of a split goes on.
func choose(rec Record, promises []promise, gone func(ID) bool) (source promise, restart bool, wait string) {
	here := map[ID]promise{}
	for _, p := range promises {
		here[p.id] = p
	}
	var promised, quorumOf, quorum int
	var unknown []ID // members of rec of whom nothing is known
	neverEntered := false
	for _, id := range rec.Members {
		p, ok := here[id]
		switch {
		case ok:
			promised++
			neverEntered = neverEntered || p.entered.Compare(rec.Generation) < 0
			if !p.leaving {
				quorumOf, quorum = quorumOf+1, quorum+1
			}
		case !gone(id):
			quorumOf++
			unknown = append(unknown, id)
		}
	}
	if promised == 0 && len(unknown) > 0 {
		return promise{}, false, fmt.Sprintf("no member of generation %s is here, and nobody says that %s is gone", rec.Generation, ordinals(unknown))
	}
	if 2*quorum < quorumOf {
		return promise{}, false, fmt.Sprintf("%d of %d members of generation %s are here, fewer than half; lacking %s", quorum, quorumOf, rec.Generation, ordinals(unknown))
	}
	best := func(ok func(promise) bool) (b promise, found bool) {
		for _, p := range promises {
			if p.position.Step < 0 || !ok(p) {
				continue
			}
			// Of equals, one who stays is the better source, then the lower ordinal.
			better := p.position.compare(b.position)
			if !found || better > 0 || better == 0 && b.leaving && !p.leaving {
				b, found = p, true
			}
		}
		return b, found
	}
	if p, ok := best(func(q promise) bool { return q.position.Generation == rec.Generation && !rec.Generation.IsZero() }); ok {
		return p, false, ""
	}
	if neverEntered {
		if p, ok := best(func(q promise) bool { return q.position.Generation == rec.Base && q.position.Step >= rec.Step }); ok {
			return p, false, ""
		}
	}
	if len(unknown) > 0 {
		return promise{}, false, fmt.Sprintf("the state of generation %s may be with %s, who is not here", rec.Generation, ordinals(unknown))
	}
	p, ok := best(func(q promise) bool { return q.position.Generation.IsZero() && q.fresh })
	if !ok {
		return promise{}, true, "the state is to be read from a checkpoint"
	}
	return p, true, ""
}

// pick picks the members of a world: those who are in the ring already, for each of them that goes costs a change, then the lowest
// ordinals. A fixed coordinator is always one of them. candidates are sorted by ID, one per ordinal; so is the answer, nil if there is no world of so few.
func (c Config) pick(rec Record, candidates []ID) []ID {
	n := c.world(len(candidates))
	if n == 0 {
		return nil
	}
	picked := make([]ID, 0, n)
	for _, inRing := range []bool{true, false} {
		for _, id := range candidates {
			if first := rec.has(id) || c.FixedCoordinator && id.Ordinal == c.FirstOrdinal; len(picked) < n && first == inRing {
				picked = append(picked, id)
			}
		}
	}
	slices.SortFunc(picked, ID.Compare)
	return picked
}
