module perseus.energy/control-plane/pause

go 1.26
