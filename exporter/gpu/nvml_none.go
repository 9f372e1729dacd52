//go:build !linux || !cgo

package gpu

import "fmt"

// without is the driver of a build that cannot load a C library.
type without struct{}

func newDriver(string) driver { return without{} }

func (without) open() error {
	return fmt.Errorf("%w (this program was built without cgo: build it with CGO_ENABLED=1 on Linux)", ErrNoLibrary)
}
func (without) close()                    {}
func (without) version() (string, code)   { return "", functionMissing }
func (without) count() (int, code)        { return 0, functionMissing }
func (without) device(int) (device, code) { return nil, functionMissing }
func (without) watch(device, string) code { return functionMissing }
func (without) event() (event, code)      { return event{}, functionMissing }
func (without) forget(string)             {}
