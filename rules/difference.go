package rules

// Difference is what a new list of rules changes, each as metrics in the order of the lists.
type Difference struct {
	Added, Removed []string
	Revalued       []string // give another value of the same samples: their Memory is of something else, and must be forgotten
	Retuned        []string // give the same value, with other help or other times of the policy: their Memory stays true
}

// Compare says what becomes different when fresh takes the place of old, for whoever reloads a rule file. Both have each metric once, as
// [Parse] sees to.
func Compare(old, fresh []Rule) (d Difference) {
	before := make(map[string]Rule, len(old))
	for _, r := range old {
		before[r.Metric] = r
	}
	for _, r := range fresh {
		was, there := before[r.Metric]
		delete(before, r.Metric)
		switch {
		case !there:
			d.Added = append(d.Added, r.Metric)
		case was == r:
		case was.retuned(r) == r:
			d.Retuned = append(d.Retuned, r.Metric)
		default:
			d.Revalued = append(d.Revalued, r.Metric)
		}
	}
	for _, r := range old {
		if _, gone := before[r.Metric]; gone {
			d.Removed = append(d.Removed, r.Metric)
		}
	}
	return d
}

// retuned is r with everything of other that does not decide what a value is.
func (r Rule) retuned(other Rule) Rule {
	r.Help, r.MaxAge, r.Missing, r.HoldFor, r.JoinFor, r.Collect = other.Help, other.MaxAge, other.Missing, other.HoldFor, other.JoinFor, other.Collect
	return r
}
