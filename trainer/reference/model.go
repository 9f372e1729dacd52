package reference

import (
	"math"
	"math/bits"
)

// The task is one that anybody can make anew from nothing: sample n has features of n alone, and its class is what a fixed, hidden linear
// rule says of them. So a sample needs no storage, and that each was used once can be checked by its number.
const (
	Features = 64
	Classes  = 10
	width    = Features + 1 // and a bias
	weights  = Classes * width
)

// mix is a bijection of 64 bits that leaves no pattern (SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// uniform is a number in [-1, 1) of two indexes.
func uniform(a, b uint64) float64 {
	return float64(int64(mix(mix(a)^bits.RotateLeft64(b, 32)))) / (1 << 63)
}

// sample gives the features of sample n, bias last, and its class.
func sample(n uint64, x *[width]float64) (class int) {
	best := math.Inf(-1)
	for f := range Features {
		x[f] = uniform(n, uint64(f))
	}
	x[Features] = 1
	for c := range Classes {
		score := 0.0
		for f := range Features {
			score += x[f] * uniform(math.MaxUint64-uint64(c), uint64(f))
		}
		if score > best {
			best, class = score, c
		}
	}
	return class
}

// model is softmax regression, by class.
type model [weights]float64

// scores are the classes' probabilities for x. The order of additions is fixed, so that all workers get the same bits.
func (m *model) scores(x *[width]float64, p *[Classes]float64) {
	top := math.Inf(-1)
	for c := range Classes {
		p[c] = 0
		for f := range width {
			p[c] += float64(m[c*width+f] * x[f]) // the conversion forbids fusing, which not every processor does
		}
		top = max(top, p[c])
	}
	sum := 0.0
	for c := range Classes {
		p[c] = math.Exp(p[c] - top)
		sum += p[c]
	}
	for c := range Classes {
		p[c] /= sum
	}
}

// one is the unit of fixed-point gradients: with it 2^22 samples of gradients up to 1 can be summed in 63 bits.
const one = 1 << 40

// gradient adds that of sample n's cross-entropy loss to sum, in fixed point: a sum of integers is the same in whatever order, so it does
// not depend on how many workers share a batch.
func (m *model) gradient(n uint64, sum []int64) {
	var x [width]float64
	var p [Classes]float64
	class := sample(n, &x)
	m.scores(&x, &p)
	p[class]--
	for c := range Classes {
		for f := range width {
			sum[c*width+f] += int64(math.Round(p[c] * x[f] * one))
		}
	}
}

// descend takes a step against a gradient that was summed over a batch.
func (m *model) descend(sum []int64, batch int, rate float64) {
	for i := range m {
		m[i] -= float64(rate * (float64(sum[i]) / one / float64(batch)))
	}
}

// accuracy is the share of n samples from a number on, which no training has reached, whose class the model finds.
func (m *model) accuracy(from uint64, n int) float64 {
	var x [width]float64
	var p [Classes]float64
	right := 0
	for i := range n {
		class, best := sample(from+uint64(i), &x), 0
		m.scores(&x, &p)
		for c := range Classes {
			if p[c] > p[best] {
				best = c
			}
		}
		if best == class {
			right++
		}
	}
	return float64(right) / float64(n)
}
