package reference

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cespare/xxhash/v2"
)

// state is all that a worker knows: whoever has it can go on. It is the same, bit for bit, at all members of a generation.
type state struct {
	Step   int64 // done; sample numbers below Step × batch have been trained on
	Ledger Ledger
	Model  model
}

// Ledger proves which samples were trained on: how many, and the sums of their numbers and of these squared. All wrap.
type Ledger struct{ Count, Sum, Squares int64 }

func (l *Ledger) add(m Ledger) {
	l.Count, l.Sum, l.Squares = l.Count+m.Count, l.Sum+m.Sum, l.Squares+m.Squares
}

func ledgerOf(n uint64) Ledger { return Ledger{1, int64(n), int64(n * n)} }

// Each says whether exactly the samples 0 to n-1 are in the ledger, each once, up to a coincidence in three numbers.
func (l Ledger) Each(n int64) bool {
	want := Ledger{}
	for i := range n {
		want.add(ledgerOf(uint64(i)))
	}
	return l == want
}

const magic = "capstan reference state 1\n"

// encode writes it down, with a hash at the end.
func (s *state) encode() []byte {
	var b bytes.Buffer
	b.WriteString(magic)
	if err := binary.Write(&b, binary.LittleEndian, s); err != nil {
		panic(err) // its size is fixed
	}
	return binary.LittleEndian.AppendUint64(b.Bytes(), xxhash.Sum64(b.Bytes()))
}

// hash is of all of it.
func (s *state) hash() uint64 { return xxhash.Sum64(s.encode()) }

var errSpoiled = errors.New("it is spoiled")

func decodeState(data []byte) (*state, error) {
	end := len(data) - 8
	s := &state{}
	if end != len(magic)+binary.Size(s) || string(data[:len(magic)]) != magic || binary.LittleEndian.Uint64(data[end:]) != xxhash.Sum64(data[:end]) {
		return nil, fmt.Errorf("read a state of %d bytes: %w", len(data), errSpoiled)
	}
	if _, err := binary.Decode(data[len(magic):end], binary.LittleEndian, s); err != nil {
		return nil, fmt.Errorf("read a state: %w", err)
	}
	return s, nil
}

// checkpoint is the file of a folder.
const checkpoint = "checkpoint"

// save makes the state durable: it is there whole or not at all.
func (s *state) save(dir string) error {
	file, err := os.CreateTemp(dir, checkpoint+".*")
	if err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	defer os.Remove(file.Name()) // which fails once it has its name
	defer file.Close()
	if _, err := file.Write(s.encode()); err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	if err := errors.Join(file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	if err := os.Rename(file.Name(), filepath.Join(dir, checkpoint)); err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	folder, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	defer folder.Close()
	if err := folder.Sync(); err != nil {
		return fmt.Errorf("write a checkpoint: %w", err)
	}
	return nil
}

// load reads the folder's checkpoint; without one it is a fresh state.
func load(dir string) (*state, error) {
	data, err := os.ReadFile(filepath.Join(dir, checkpoint))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return &state{}, nil
	case err != nil:
		return nil, fmt.Errorf("read the checkpoint: %w", err)
	}
	return decodeState(data)
}
